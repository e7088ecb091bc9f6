// crossdock-run as a whole: real launches of small shell programs.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "command.h"

namespace xd::test {
namespace {

using namespace std::chrono_literals;

// Program and options of a launch of `script` in a shell.
std::vector<std::string> launch(std::vector<std::string> options, const std::string& script) {
  std::vector<std::string> all{XD_CROSSDOCK_RUN};
  all.insert(all.end(), options.begin(), options.end());
  all.insert(all.end(), {"--", "sh", "-c", script});
  return all;
}

Finished run(const std::vector<std::string>& options, const std::string& script) {
  return Command(launch(options, script)).wait();
}

std::vector<std::string> sorted_lines(const std::string& text) {
  auto lines = lines_of(text);
  std::sort(lines.begin(), lines.end());
  return lines;
}

using Texts = std::vector<std::string>;

TEST(Launcher, SucceedsWhenAllRanksDo) {
  const auto result = run({"-n", "3"}, "exit 0");
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.out + result.err, "");
}

TEST(Launcher, PrefixesLinesWithTheRankAndKeepsStreamsApart) {
  const auto result = run({"-n", "2"}, "echo out $RANK; echo err $RANK >&2; echo; printf last");
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(sorted_lines(result.out),
            (Texts{"[0] ", "[0] last", "[0] out 0", "[1] ", "[1] last", "[1] out 1"}));
  EXPECT_EQ(sorted_lines(result.err), (Texts{"[0] err 0", "[1] err 1"}));
}

TEST(Launcher, HasNoPrefixWhereThatIsWantedOrOneProcessWrites) {
  EXPECT_EQ(sorted_lines(run({"-n", "2", "--no-prefix"}, "echo $RANK").out), (Texts{"0", "1"}));
  EXPECT_EQ(run({"-n", "1"}, "echo $RANK; printf x").out, "0\nx");
  EXPECT_EQ(run({"-n", "4", "--threads"}, "echo $RANK; printf x").out, "0\nx");
}

TEST(Launcher, NeverTearsALine) {
  // Each line is written in pieces by all of eight ranks at once.
  const auto result = run({"-n", "8"},
                          "i=0; while [ $i -lt 300 ]; do "
                          "printf 'abcdefghij'; printf 'klmnopqrst'; echo $i; i=$((i+1)); done");
  EXPECT_EQ(result.code, 0);
  std::map<char, int> next;
  for (const std::string& line : lines_of(result.out)) {
    ASSERT_GT(line.size(), 4u);
    const char rank = line[1];
    ASSERT_EQ(line.substr(2), "] abcdefghijklmnopqrst" + std::to_string(next[rank]++));
  }
  ASSERT_EQ(next.size(), 8u);
  for (const auto& [rank, lines] : next) EXPECT_EQ(lines, 300) << rank;
}

TEST(Launcher, PassesMuchOutputOnCompletely) {
  const auto result = run({"-n", "2"}, "seq 200000");
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(lines_of(result.out).size(), 400000u);
}

TEST(Launcher, TellsRanksWhoTheyAre) {
  const auto result = run({"-n", "3"},
                          "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR "
                          "$XD_RUN_KIND");
  EXPECT_EQ(sorted_lines(result.out),
            (Texts{"[0] 0 0 3 3 127.0.0.1 processes", "[1] 1 1 3 3 127.0.0.1 processes",
                   "[2] 2 2 3 3 127.0.0.1 processes"}));
  EXPECT_EQ(run({"-n", "5", "--threads"}, "echo $RANK $WORLD_SIZE $XD_RUN_KIND").out,
            "0 5 threads\n");
}

TEST(Launcher, MakesOneMeetingPointAndSecretPerLaunch) {
  std::set<std::string> secrets;
  for (int i = 0; i < 2; ++i) {
    const auto result = run({"-n", "4", "--no-prefix"}, "echo $MASTER_PORT $XD_JOB_SECRET");
    const auto lines = lines_of(result.out);
    ASSERT_EQ(lines.size(), 4u);
    EXPECT_EQ(std::set<std::string>(lines.begin(), lines.end()).size(), 1u);
    const auto space = lines[0].find(' ');
    const int port = std::stoi(lines[0].substr(0, space));
    EXPECT_GE(port, 1024);
    EXPECT_LE(port, 65535 - 15);
    secrets.insert(lines[0].substr(space + 1));
    EXPECT_GE(secrets.begin()->size(), 32u);
  }
  EXPECT_EQ(secrets.size(), 2u) << "the secret of one launch must not open another";
}

TEST(Launcher, GivesRanksNoInputAndNoDescriptorsOfItsOwn) {
  const auto result = run({"-n", "2", "--no-prefix"}, "cat; ls -1 /proc/self/fd");
  const auto alone = Command({"ls", "-1", "/proc/self/fd"}).wait();
  EXPECT_EQ(sorted_lines(result.out), sorted_lines(alone.out + alone.out));
}

TEST(Launcher, BlocksNoSignalsOfRanks) {
  // Without a shell between them, which would unblock all signals itself.
  const std::vector<std::string> program{"grep", "SigBlk", "/proc/self/status"};
  std::vector<std::string> launched{XD_CROSSDOCK_RUN, "-n", "2", "--no-prefix"};
  launched.insert(launched.end(), program.begin(), program.end());
  const auto alone = Command(program).wait();
  EXPECT_EQ(Command(launched).wait().out, alone.out + alone.out);
}

TEST(Launcher, ReturnsTheFirstFailureAndEndsTheOthers) {
  const auto result = run({"-n", "3", "--grace", "1"},
                          "case $RANK in 1) exit 7;; 2) sleep 0.5; exit 9;; esac; sleep 100");
  EXPECT_EQ(result.code, 7);
  EXPECT_EQ(result.err, "crossdock-run: rank 1 failed: exit code 7; ended rank 0\n");
  EXPECT_GE(result.time, 1s);
  EXPECT_LT(result.time, 20s);
}

TEST(Launcher, NamesTheSignalThatEndedARank) {
  const auto result = run({"-n", "2"}, "[ $RANK = 0 ] || kill -SEGV $$");
  EXPECT_EQ(result.code, 128 + SIGSEGV);
  EXPECT_EQ(result.err, "crossdock-run: rank 1 failed: killed by signal 11 (Segmentation fault)\n");
}

TEST(Launcher, LetsOthersEndByThemselvesInTheGracePeriod) {
  const auto result =
      run({"-n", "2", "--grace", "30"}, "[ $RANK = 0 ] && exit 3; sleep 0.5; echo done");
  EXPECT_EQ(result.code, 3);
  EXPECT_EQ(result.out, "[1] done\n");
  EXPECT_EQ(result.err, "crossdock-run: rank 0 failed: exit code 3\n");
  EXPECT_LT(result.time, 20s);
}

TEST(Launcher, KillsARankThatIgnoresBeingAskedToEnd) {
  const auto result =
      run({"-n", "2", "--grace", "0"},
          "[ $RANK = 0 ] && sleep 0.5 && exit 3; trap '' TERM; while :; do sleep 1; done");
  EXPECT_EQ(result.code, 3);
  EXPECT_EQ(result.err, "crossdock-run: rank 0 failed: exit code 3; ended rank 1\n");
  EXPECT_GE(result.time, 2s);
  EXPECT_LT(result.time, 20s);
}

TEST(Launcher, EndsEverythingAtTheDeadlineAndNamesWhoStillRan) {
  const auto result = run({"-n", "3", "--timeout", "0.7"}, "[ $RANK = 1 ] || sleep 100");
  EXPECT_EQ(result.code, 124);
  EXPECT_EQ(result.err, "crossdock-run: not finished after 0.7 s; ended ranks 0, 2\n");
  EXPECT_GE(result.time, 700ms);
  EXPECT_LT(result.time, 20s);
}

TEST(Launcher, TheDeadlineAlsoEndsAStoppedSingleProcess) {
  const auto result = run({"-n", "2", "--threads", "--timeout", "0.5"}, "kill -STOP $$");
  EXPECT_EQ(result.code, 124);
  EXPECT_EQ(result.err, "crossdock-run: not finished after 0.5 s; ended rank 0\n");
}

TEST(Launcher, ExpendableRanksMayFail) {
  const auto killed = run({"-n", "4", "--expendable", "1,3"},
                          "case $RANK in 1) kill -KILL $$;; 3) exit 5;; esac; sleep 0.3; echo ok");
  EXPECT_EQ(killed.code, 0);
  EXPECT_EQ(killed.err, "");
  EXPECT_EQ(sorted_lines(killed.out), (Texts{"[0] ok", "[2] ok"}));

  const auto another = run({"-n", "2", "--expendable", "1"}, "[ $RANK = 1 ] && exit 5; exit 6");
  EXPECT_EQ(another.code, 6);
}

TEST(Launcher, WhereAllRanksAreExpendableEachEndsByItself) {
  const auto killed = run({"-n", "3", "--grace", "0.1", "--expendable", "0,1,2"},
                          "[ $RANK = 1 ] && kill -KILL $$; sleep 1; echo ok");
  EXPECT_EQ(killed.code, 0);
  EXPECT_EQ(sorted_lines(killed.out), (Texts{"[0] ok", "[2] ok"}));
}

TEST(Launcher, AnExpendableRankThatHangsIsEndedAfterTheOthers) {
  const auto result =
      run({"-n", "2", "--grace", "0.3", "--expendable", "1"}, "[ $RANK = 0 ] || kill -STOP $$");
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_LT(result.time, 20s);
}

// A launch of `script` in a new folder, in which its ranks find what others have written.
std::vector<std::string> launch_in_folder(std::vector<std::string> options,
                                          const std::string& script) {
  options.insert(options.begin(), {"--timeout", "50"});
  auto command = launch(std::move(options), script);
  command.insert(command.begin(), {"sh", "-c",
                                   "folder=$(mktemp -d) && cd $folder || exit 99; \"$@\"; code=$?; "
                                   "rm -r $folder; exit $code",
                                   "sh"});
  return command;
}

TEST(Launcher, StartsAFailedRankAgainWhileOthersGoOn) {
  const auto result = Command(launch_in_folder({"-n", "3", "--respawn", "2"},
                                               "if [ $RANK != 1 ]; then until [ -e back ]; do "
                                               "sleep 0.02; done; echo ok; exit 0; fi; "
                                               "echo start $XD_RUN_RESPAWNED; "
                                               "case $XD_RUN_RESPAWNED in 0) kill -KILL $$;; "
                                               "1) exit 5;; esac; touch back"))
                          .wait();
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(sorted_lines(result.out),
            (Texts{"[0] ok", "[1] start 0", "[1] start 1", "[1] start 2", "[2] ok"}));
  EXPECT_EQ(result.err,
            "crossdock-run: rank 1 failed: killed by signal 9 (Killed); started again, 1 of 2\n"
            "crossdock-run: rank 1 failed: exit code 5; started again, 2 of 2\n");
}

TEST(Launcher, ReturnsTheLastFailureOfARankThatHasBeenStartedAgain) {
  const auto result = run({"-n", "2", "--grace", "0", "--respawn", "2"},
                          "[ $RANK = 1 ] && exit $((5 + XD_RUN_RESPAWNED)); sleep 100");
  EXPECT_EQ(result.code, 7);
  EXPECT_EQ(result.err,
            "crossdock-run: rank 1 failed: exit code 5; started again, 1 of 2\n"
            "crossdock-run: rank 1 failed: exit code 6; started again, 2 of 2\n"
            "crossdock-run: rank 1 failed: exit code 7; ended rank 0\n");
  EXPECT_GE(result.time, 300ms) << "0.1 s before its first start again, and 0.2 s before the next";
}

// Rank 1 removes the program, and fails.
std::vector<std::string> launch_that_removes_itself(std::vector<std::string> options,
                                                    const std::string& rank_0) {
  auto command = launch_in_folder(std::move(options), "");
  const auto script =
      "#!/bin/sh\n[ $RANK = 1 ] && { until [ -e up ]; do sleep 0.02; done; rm program; exit 5; "
      "}\n" +
      rank_0;
  // Instead of the shell.
  command.resize(command.size() - 3);
  command.emplace_back("./program");
  command[2].insert(command[2].find("\"$@\""), "printf '%s' \"$0\" >program; chmod +x program; ");
  command[3] = script;
  return command;
}

TEST(Launcher, ARankThatCannotBeStartedAgainHasFailed) {
  const auto result = Command(launch_that_removes_itself(
                                  {"-n", "2", "--respawn", "2", "--grace", "0.1"},
                                  "trap 'echo ends; exit 0' TERM; sleep 100 & touch up; wait"))
                          .wait();
  EXPECT_EQ(result.code, 5);
  EXPECT_EQ(result.out, "[0] ends\n");
  const std::string why = "cannot run './program': No such file or directory\n";
  EXPECT_EQ(result.err,
            "crossdock-run: rank 1 failed: exit code 5; cannot be started again, 1 of 2: " + why +
                "crossdock-run: rank 1 failed: exit code 5; cannot be started again, 2 of 2: " +
                why + "crossdock-run: rank 1 failed: exit code 5; ended rank 0\n");
}

TEST(Launcher, AnExpendableRankNeedNotBeStartedAgain) {
  const auto result =
      Command(launch_that_removes_itself({"-n", "2", "--respawn", "1", "--expendable", "1"},
                                         "touch up; while [ -e program ]; do sleep 0.02; done; "
                                         "sleep 1; echo ok"))
          .wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out, "[0] ok\n");
}

// One after the other: each is started again, while the next is there from the beginning. Nobody
// can join those that have just been started again.
TEST(Launcher, AMistakeThatAllMakeEndsTheJob) {
  const auto result =
      Command(launch_in_folder({"-n", "3", "--respawn", "9", "--grace", "0"},
                               "echo start; [ $XD_RUN_RESPAWNED = 1 ] && { touch again-$RANK; "
                               "sleep 100; }; touch again--1; "
                               "until [ -e again-$((RANK - 1)) ]; do sleep 0.02; done; "
                               "exit $((5 + RANK))"))
          .wait();
  EXPECT_EQ(result.code, 7) << result.err;
  EXPECT_EQ(sorted_lines(result.out),
            (Texts{"[0] start", "[0] start", "[1] start", "[1] start", "[2] start"}));
}

TEST(Launcher, RanksThatCameBackLongAgoAreThereForOthers) {
  const auto result =
      Command(launch_in_folder(
                  {"-n", "2", "--respawn", "1"},
                  "case $RANK$XD_RUN_RESPAWNED in 10) exit 4;; 01) touch back; exit 0;; "
                  "11) sleep 10.1; touch settled; until [ -e back ]; do sleep 0.02; done;; "
                  "00) until [ -e settled ]; do sleep 0.02; done; exit 5;; esac"))
          .wait();
  EXPECT_EQ(result.code, 0) << result.err;
}

TEST(Launcher, AnInterruptEndsAPauseBetweenStarts) {
  Command command(launch({"-n", "2", "--no-prefix", "--respawn", "1000"},
                         "[ $RANK = 0 ] && exec sleep 1000; echo start; exit 1"));
  ASSERT_TRUE(eventually([&] { return lines_of(command.out()).size() >= 4; }));
  command.signal(SIGINT);
  const auto result = command.wait();
  EXPECT_EQ(result.code, 128 + SIGINT);
  EXPECT_NE(result.err.find("interrupted by "), std::string::npos) << result.err;
}

TEST(Launcher, TellsARankThatIsStartedAgainTheSame) {
  const auto result = run({"-n", "2", "--grace", "0", "--respawn", "1", "--no-prefix"},
                          "[ $RANK = 0 ] && sleep 100; "
                          "echo $RANK $WORLD_SIZE $MASTER_PORT $XD_JOB_SECRET; exit 1");
  const auto lines = lines_of(result.out);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0], lines[1]);
}

TEST(Launcher, StartsNoRankAgainWhenNoneIsLeft) {
  // A process that has ended is there until the launcher has looked at it.
  const auto result =
      Command(launch_in_folder({"-n", "2", "--respawn", "3"},
                               "[ $RANK = 0 ] && { echo $$ >pid.new; mv pid.new pid; exit 0; }; "
                               "until [ -e pid ]; do sleep 0.02; done; "
                               "while kill -0 $(cat pid) 2>/dev/null; do sleep 0.02; done; exit 4"))
          .wait();
  EXPECT_EQ(result.code, 4);
  EXPECT_EQ(result.err, "crossdock-run: rank 1 failed: exit code 4\n");
}

TEST(Launcher, AnExpendableRankMayFailWhenItHasBeenStartedAgain) {
  const auto result =
      Command(launch_in_folder({"-n", "2", "--respawn", "1", "--expendable", "1"},
                               "[ $RANK = 1 ] && { touch start-$XD_RUN_RESPAWNED; exit 5; }; "
                               "until [ -e start-1 ]; do sleep 0.02; done"))
          .wait();
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.err, "crossdock-run: rank 1 failed: exit code 5; started again, 1 of 1\n");
}

// The process numbers that a script has printed, once there are `count`.
std::vector<pid_t> printed_pids(const Command& command, std::size_t count) {
  EXPECT_TRUE(eventually([&] { return lines_of(command.out()).size() >= count; }));
  std::vector<pid_t> pids;
  for (const std::string& line : lines_of(command.out())) pids.push_back(std::stoi(line));
  return pids;
}

bool all_gone(const std::vector<pid_t>& pids) {
  return eventually([&] { return std::none_of(pids.begin(), pids.end(), alive); });
}

// Prints the numbers of the rank and of two generations below it; all of them ignore SIGTERM and
// SIGHUP.
constexpr const char* kFamily =
    "trap '' TERM HUP; sh -c 'sleep 1000 & echo $!; wait' & echo $!; echo $$; wait; wait";

TEST(Launcher, EndsWhatRanksHaveStarted) {
  Command command(launch({"-n", "2", "--no-prefix", "--timeout", "3"}, kFamily));
  const auto pids = printed_pids(command, 6);
  ASSERT_TRUE(std::all_of(pids.begin(), pids.end(), alive));
  EXPECT_EQ(command.wait().code, 124);
  EXPECT_TRUE(all_gone(pids));
}

TEST(Launcher, EndsWhatARankLeavesBehind) {
  const auto result = run({"-n", "2", "--no-prefix"}, "sleep 1000 & echo $!");
  EXPECT_EQ(result.code, 0);
  EXPECT_LT(result.time, 20s);
  std::vector<pid_t> pids;
  for (const std::string& line : lines_of(result.out)) pids.push_back(std::stoi(line));
  ASSERT_EQ(pids.size(), 2u);
  EXPECT_TRUE(all_gone(pids));
}

TEST(Launcher, NothingSurvivesWhenItIsKilled) {
  Command command(launch({"-n", "2", "--no-prefix"}, kFamily));
  auto pids = printed_pids(command, 6);
  const auto children = command.children();
  ASSERT_GE(children.size(), 2u);
  pids.insert(pids.end(), children.begin(), children.end());
  ASSERT_TRUE(std::all_of(pids.begin(), pids.end(), alive));
  command.signal(SIGKILL);
  EXPECT_EQ(command.wait().code, 128 + SIGKILL);
  EXPECT_TRUE(all_gone(pids));
}

TEST(Launcher, ARankThatHasBeenStartedAgainDoesNotSurviveEither) {
  for (const int number : {SIGINT, SIGKILL}) {
    const std::string once = "[ $RANK$XD_RUN_RESPAWNED = 10 ] && exit 1; trap 'exit 3' INT; ";
    Command command(launch({"-n", "2", "--no-prefix", "--respawn", "9", "--grace", "0"},
                           once + "sleep 1000 & echo $!; echo $$; wait"));
    const auto pids = printed_pids(command, 4);
    ASSERT_TRUE(std::all_of(pids.begin(), pids.end(), alive));
    command.signal(number);
    const auto result = command.wait();
    EXPECT_EQ(result.code, 128 + number);
    EXPECT_TRUE(all_gone(pids));
    EXPECT_EQ(lines_of(result.out).size(), 4u) << "nobody is started again behind a signal";
  }
}

TEST(Launcher, NothingSurvivesWhenNobodyReadsTheOutput) {
  const auto result = Command({"sh", "-c",
                               "trap '' PIPE; " XD_CROSSDOCK_RUN
                               " -n 2 --no-prefix -- sh -c 'echo $$; exec yes' | head -n 2"})
                          .wait();
  EXPECT_EQ(result.code, 0);
  EXPECT_LT(result.time, 20s);
  const auto lines = lines_of(result.out);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_TRUE(all_gone({std::stoi(lines[0])}));
}

TEST(Launcher, ForwardsInterrupts) {
  for (const auto& [number, name] : {std::pair(SIGINT, "INT"), std::pair(SIGTERM, "TERM")}) {
    const std::string trap = std::string("trap 'echo got ") + name + "; exit 3' " + name;
    Command command(launch({"-n", "2"}, trap + "; echo ready; while :; do sleep 0.05; done"));
    ASSERT_TRUE(eventually([&] { return lines_of(command.out()).size() == 2; }));
    command.signal(number);
    const auto result = command.wait();
    EXPECT_EQ(result.code, 128 + number);
    EXPECT_NE(result.out.find(std::string("[0] got ") + name), std::string::npos) << result.out;
    EXPECT_NE(result.out.find(std::string("[1] got ") + name), std::string::npos) << result.out;
    EXPECT_NE(result.err.find("crossdock-run: interrupted by "), std::string::npos) << result.err;
  }
}

TEST(Launcher, ASecondInterruptDoesNotWait) {
  Command command(launch({"-n", "2", "--grace", "100"},
                         "trap '' INT TERM; echo ready; while :; do sleep 1; done"));
  ASSERT_TRUE(eventually([&] { return lines_of(command.out()).size() == 2; }));
  command.signal(SIGINT);
  command.signal(SIGTERM);
  EXPECT_EQ(command.wait().code, 128 + SIGINT);
}

TEST(Launcher, EndsOnlyItsOwn) {
  Command bystander({"sleep", "1000"});
  EXPECT_EQ(run({"-n", "2", "--timeout", "0.3"}, "sleep 100").code, 124);
  bystander.signal(SIGTERM);
  EXPECT_EQ(bystander.wait().code, 128 + SIGTERM) << "ended before this test ended it";
}

TEST(Launcher, TellsWhyAProgramCannotStart) {
  const auto missing = Command({XD_CROSSDOCK_RUN, "-n", "2", "/no/such/program"}).wait();
  EXPECT_EQ(missing.code, 127);
  EXPECT_EQ(missing.err,
            "crossdock-run: cannot run '/no/such/program': No such file or directory\n");
  const auto no_program = Command({XD_CROSSDOCK_RUN, "-n", "2", "/etc/passwd"}).wait();
  EXPECT_EQ(no_program.code, 126);
  EXPECT_NE(no_program.err.find("Permission denied"), std::string::npos) << no_program.err;
}

TEST(Launcher, ExplainsUsageErrorsHelpAndVersion) {
  const auto usage = Command({XD_CROSSDOCK_RUN, "-n", "many", "true"}).wait();
  EXPECT_EQ(usage.code, 2);
  EXPECT_NE(usage.err.find("-n many: expected a whole number"), std::string::npos) << usage.err;
  const auto help = Command({XD_CROSSDOCK_RUN, "--help"}).wait();
  EXPECT_EQ(help.code, 0);
  EXPECT_TRUE(help.out.starts_with("usage: crossdock-run")) << help.out;
  const auto version = Command({XD_CROSSDOCK_RUN, "--version"}).wait();
  EXPECT_EQ(version.code, 0);
  EXPECT_EQ(version.out, "crossdock-run " XD_PROJECT_VERSION "\n");
}

}  // namespace
}  // namespace xd::test
