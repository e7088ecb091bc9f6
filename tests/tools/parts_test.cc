// The pure parts of crossdock-run: command line, lines, environment.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "environment.h"
#include "lines.h"
#include "options.h"

namespace xd::run {
namespace {

using namespace std::chrono_literals;
using Texts = std::vector<std::string>;

std::string usage_error(const Texts& arguments) {
  try {
    parse_options(arguments);
    return "";
  } catch (const UsageError& error) {
    return error.what();
  }
}

TEST(Options, Defaults) {
  const Options options = parse_options({"-n", "4", "program"});
  EXPECT_EQ(options.ranks, 4);
  EXPECT_EQ(options.processes(), 4);
  EXPECT_FALSE(options.threads);
  EXPECT_TRUE(options.prefix);
  EXPECT_EQ(options.timeout, 600s);
  EXPECT_EQ(options.grace, 5s);
  EXPECT_TRUE(options.expendable.empty());
  EXPECT_EQ(options.respawns, 0);
  EXPECT_EQ(options.command, Texts{"program"});
}

TEST(Options, AllOfThem) {
  const Options options =
      parse_options({"--timeout", "1.5", "--no-prefix", "--grace", "0", "--expendable", "2,0,2",
                     "--respawn", "2", "-n", "3", "--", "-program", "-n", "9"});
  EXPECT_EQ(options.ranks, 3);
  EXPECT_FALSE(options.prefix);
  EXPECT_EQ(options.timeout, 1500ms);
  EXPECT_EQ(options.grace, 0s);
  EXPECT_EQ(options.expendable, (std::set<int>{0, 2}));
  EXPECT_EQ(options.respawns, 2);
  EXPECT_TRUE(options.hosts.empty());
  EXPECT_EQ(options.command, (Texts{"-program", "-n", "9"}));
}

TEST(Options, HostsSayHowManyRanksThereAre) {
  const auto parse = [](const char* hosts) { return parse_options({"--hosts", hosts, "program"}); };
  EXPECT_EQ(parse("2x3").hosts, (std::vector{3, 3}));
  EXPECT_EQ(parse("2x3").ranks, 6);
  EXPECT_EQ(parse("2,1,2").hosts, (std::vector{2, 1, 2}));
  EXPECT_EQ(parse("2,1,2").ranks, 5);
  EXPECT_EQ(parse("4").ranks, 4);
  EXPECT_EQ(parse_options({"-n", "4", "--hosts", "2x2", "program"}).ranks, 4);
  EXPECT_EQ(usage_error({"-n", "3", "--hosts", "2x2", "program"}),
            "--hosts has 4 ranks, expected 3 as -n says");
  EXPECT_EQ(usage_error({"--hosts", "600x2", "program"}),
            "--hosts has 1200 ranks, expected at most 1024");
  EXPECT_EQ(usage_error({"--hosts", "2x", "program"}),
            "--hosts : expected a whole number from 1 to 1024");
  EXPECT_EQ(usage_error({"--hosts", "2,0", "program"}),
            "--hosts 0: expected a whole number from 1 to 1024");
}

TEST(Options, OfTheProgramAreLeftAlone) {
  const Options options = parse_options({"-n", "2", "program", "--threads", "--", "--help"});
  EXPECT_FALSE(options.threads);
  EXPECT_FALSE(options.help);
  EXPECT_EQ(options.command, (Texts{"program", "--threads", "--", "--help"}));
}

TEST(Options, OneProcessNeedsNoPrefix) {
  EXPECT_FALSE(parse_options({"-n", "1", "program"}).prefix);
  const Options threads = parse_options({"-n", "8", "--threads", "program"});
  EXPECT_FALSE(threads.prefix);
  EXPECT_EQ(threads.processes(), 1);
}

TEST(Options, HelpAndVersionNeedNothingElse) {
  EXPECT_TRUE(parse_options({"--help"}).help);
  EXPECT_TRUE(parse_options({"-h", "--nonsense"}).help);
  EXPECT_TRUE(parse_options({"--version"}).version);
}

TEST(Options, MistakesAreNamed) {
  EXPECT_EQ(usage_error({}), "-n is missing: how many ranks?");
  EXPECT_EQ(usage_error({"program"}), "-n is missing: how many ranks?");
  EXPECT_EQ(usage_error({"-n", "2"}), "the program to run is missing");
  EXPECT_EQ(usage_error({"-n", "2", "--"}), "the program to run is missing");
  EXPECT_EQ(usage_error({"-n"}), "-n: 1 required TEXT missing");
  EXPECT_EQ(usage_error({"-n", "2", "--fast", "program"}), "unknown option '--fast'");
  for (const char* bad : {"0", "-1", "1025", "2x", "", " 2", "99999999999"}) {
    EXPECT_EQ(usage_error({"-n", bad, "program"}),
              std::string("-n ") + bad + ": expected a whole number from 1 to 1024");
  }
  for (const char* bad : {"-1", "x", "", "nan", "inf", "1e9", "5s"}) {
    EXPECT_EQ(usage_error({"-n", "2", "--grace", bad, "program"}),
              std::string("--grace ") + bad + ": expected seconds, from 0 to 1000000");
  }
  EXPECT_EQ(usage_error({"-n", "2", "--timeout", "0", "program"}), "--timeout 0: expected more");
  EXPECT_EQ(usage_error({"-n", "2", "--expendable", "0,2", "program"}),
            "--expendable 2: expected ranks below 2");
  EXPECT_EQ(usage_error({"-n", "2", "--expendable", "0,", "program"}),
            "--expendable : expected a whole number from 0 to 1023");
  EXPECT_EQ(usage_error({"-n", "2", "--threads", "--expendable", "0", "program"}),
            "--expendable needs a process per rank, but --threads makes one of all");
  EXPECT_EQ(usage_error({"-n", "2", "--respawn", "-1", "program"}),
            "--respawn -1: expected a whole number from 0 to 1000");
  EXPECT_EQ(usage_error({"-n", "1", "--respawn", "1", "program"}),
            "--respawn needs another process that goes on, but there is one rank");
  EXPECT_EQ(usage_error({"-n", "2", "--threads", "--respawn", "1", "program"}),
            "--respawn needs another process that goes on, but --threads makes one of all");
}

TEST(Options, TheManualNamesEachOption) {
  const std::string manual = help_text();
  for (const char* option : {"-n N", "--threads", "--timeout", "--grace", "--expendable",
                             "--respawn", "--no-prefix", "--help", "--version"}) {
    EXPECT_NE(manual.find(option), std::string::npos) << option;
  }
}

TEST(Lines, AreTheSameHoweverTheyArrive) {
  const std::string text = "one\n\ntwo words\nthree";
  for (std::size_t piece = 1; piece <= text.size(); ++piece) {
    Lines lines("[7] ");
    std::string result;
    for (std::size_t at = 0; at < text.size(); at += piece) {
      result += lines.feed(std::string_view(text).substr(at, piece));
      EXPECT_TRUE(result.empty() || result.back() == '\n') << "only whole lines are passed on";
    }
    EXPECT_EQ(result, "[7] one\n[7] \n[7] two words\n");
    EXPECT_EQ(lines.finish(), "[7] three\n");
    EXPECT_EQ(lines.finish(), "");
  }
}

TEST(Lines, WithoutPrefixStayAsTheyAre) {
  Lines lines("");
  EXPECT_EQ(lines.feed("a\r\nb\n"), "a\r\nb\n");
  EXPECT_EQ(lines.finish(), "");
}

TEST(Lines, OfEndlessLengthAreCut) {
  Lines lines("");
  const std::string longest(Lines::kLongest, 'x');
  EXPECT_EQ(lines.feed(longest), "");
  EXPECT_EQ(lines.feed("\n"), longest + "\n") << "the longest line is whole";
  EXPECT_EQ(lines.feed(longest + longest + "y\n"), longest + "\n" + longest + "\ny\n");
}

TEST(Environment, ReplacesOnlyItsOwnVariables) {
  const JobEnvironment job{
      .ranks = 4, .threads = false, .master_port = 1234, .secret = "abc", .hosts = {}};
  const auto environment =
      rank_environment(job, 2, 3, {"RANK=9", "XD_RUN_RESPAWNED=7", "RANKS=9", "PATH=/bin", "odd"});
  const auto has = [&](const char* entry) {
    return std::count(environment.begin(), environment.end(), entry) == 1;
  };
  for (const char* entry :
       {"RANK=2", "LOCAL_RANK=2", "WORLD_SIZE=4", "LOCAL_WORLD_SIZE=4", "MASTER_ADDR=127.0.0.1",
        "MASTER_PORT=1234", "XD_JOB_SECRET=abc", "XD_RUN_KIND=processes", "XD_RUN_RESPAWNED=3",
        "RANKS=9", "PATH=/bin", "odd"}) {
    EXPECT_TRUE(has(entry)) << entry;
  }
  EXPECT_EQ(environment.size(), 12u);
}

TEST(Environment, TellsAProcessItsHost) {
  JobEnvironment job{
      .ranks = 5, .threads = false, .master_port = 1234, .secret = "abc", .hosts = {2, 1, 2}};
  const auto host_of = [&](int rank) {
    std::string hosts;
    for (const std::string& entry : rank_environment(job, rank, 0, {"XD_HOST_ID=mine"})) {
      if (entry.starts_with("XD_HOST_ID=") || entry.starts_with("XD_RUN_HOSTS=")) {
        hosts += entry + " ";
      }
    }
    return hosts;
  };
  const char* expected[] = {"0", "0", "1", "2", "2"};
  for (int rank = 0; rank < 5; ++rank) {
    EXPECT_EQ(host_of(rank),
              std::string("XD_RUN_HOSTS=2,1,2 XD_HOST_ID=host-") + expected[rank] + " ");
  }
  job.threads = true;
  EXPECT_EQ(host_of(0), "XD_HOST_ID=mine XD_RUN_HOSTS=2,1,2 ");
}

}  // namespace
}  // namespace xd::run
