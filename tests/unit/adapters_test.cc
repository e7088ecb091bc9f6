// Which network adapter a rank takes: places on made-up PCI buses, the choice among adapters, and
// what libfabric is asked for, by a fake of it.
#include "comm/remote/adapters.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <random>

#include "unit/fabric_fake.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

namespace fs = std::filesystem;
using net::Adapter;
using Link = net::Adapter::Link;
using Strings = std::vector<std::string>;

// A folder like /sys.
class Sysfs {
 public:
  Sysfs() : root_(fs::temp_directory_path() / ("xd-sysfs-" + std::to_string(::getpid()))) {
    fs::remove_all(root_);
    for (const char* folder : {"devices", "bus/pci/devices", "class"})
      fs::create_directories(root_ / folder);
  }
  ~Sysfs() { fs::remove_all(root_); }
  Sysfs(const Sysfs&) = delete;
  Sysfs& operator=(const Sysfs&) = delete;

  const fs::path& root() const { return root_; }

  // A function at the end of this path below `devices`.
  void add(const std::string& path, int numa_node = -1) {
    const fs::path folder = root_ / "devices" / path;
    fs::create_directories(folder);
    std::ofstream(folder / "numa_node") << numa_node << "\n";
    link(folder, "bus/pci/devices/" + folder.filename().string());
  }
  void add_virtual(const std::string& path, const std::string& physical, int numa_node = -1) {
    add(path, numa_node);
    fs::create_symlink("../" + physical, root_ / "devices" / path / "physfn");
  }
  // A name in a class, for a folder below `devices`.
  void add_class(const std::string& class_name, const std::string& name, const std::string& path) {
    fs::create_directories(root_ / "class" / class_name / name);
    fs::create_directories(root_ / "devices" / path);
    link(root_ / "devices" / path, "class/" + class_name + "/" + name + "/device");
  }

 private:
  void link(const fs::path& to, const fs::path& at) {
    fs::create_symlink(fs::relative(to, (root_ / at).parent_path()), root_ / at);
  }
  fs::path root_;
};

// Two sockets; on each a switch with two GPUs and two adapters, and another root with a fifth
// device.
void add_host(Sysfs& sysfs) {
  for (const int node : {0, 1}) {
    const std::string bus = node == 0 ? "1" : "9", root = "pci0000:" + bus + "5/0000:" + bus;
    const std::string port = root + "5:01.0/0000:" + bus + "6:00.0/0000:" + bus + "7:0";
    sysfs.add(port + "0.0/0000:" + bus + "8:00.0", node);  // GPU
    sysfs.add(port + "1.0/0000:" + bus + "9:00.0", node);  // GPU
    sysfs.add(port + "2.0/0000:" + bus + "a:00.0", node);  // adapter
    sysfs.add(port + "3.0/0000:" + bus + "b:00.0", node);  // adapter
    sysfs.add("pci0000:" + bus + "d/0000:" + bus + "d:00.0/0000:" + bus + "e:00.0", node);
  }
}

TEST(PciPlace, IsTheWayFromTheRootAndTheNumaNode) {
  Sysfs sysfs;
  add_host(sysfs);
  const PciPlace place = pci_place(sysfs.root(), "0000:18:00.0");
  EXPECT_EQ(place.path, "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0");
  EXPECT_EQ(place.function, "0000:18:00.0");
  EXPECT_EQ(place.physical, "0000:18:00.0");
  EXPECT_EQ(place.numa_node, 0);
}

TEST(PciPlace, BeginsAtTheRootWhereverThatIs) {
  Sysfs sysfs;
  sysfs.add("LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/0f/pci0001:00/0001:00:00.0", 1);
  sysfs.add("pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0");
  EXPECT_EQ(pci_place(sysfs.root(), "0001:00:00.0").path, "pci0001:00/0001:00:00.0");
  const PciPlace behind = pci_place(sysfs.root(), "10000:e1:00.0");
  EXPECT_EQ(behind.path, "pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0");
  EXPECT_EQ(behind.numa_node, -1);
}

TEST(PciPlace, OfAPartOfAFunctionIsTheFunctions) {
  Sysfs sysfs;
  sysfs.add("pci0000:00/0000:00:03.0", 0);
  sysfs.add_class("net", "eth0", "pci0000:00/0000:00:03.0/virtio0");
  sysfs.add_class("infiniband", "mlx5_2", "pci0000:00/0000:00:03.0/mlx5_core.sf.4");
  for (const auto& [class_name, name] : {std::pair("net", "eth0"), {"infiniband", "mlx5_2"}}) {
    const PciPlace place = pci_place_in_class(sysfs.root(), class_name, name);
    EXPECT_EQ(place.path, "pci0000:00/0000:00:03.0") << name;
    EXPECT_EQ(place.numa_node, 0) << name;
  }
}

TEST(PciPlace, OfAVirtualFunctionNamesThePhysicalOne) {
  Sysfs sysfs;
  sysfs.add("pci0000:15/0000:15:01.0/0000:16:00.0");
  sysfs.add_virtual("pci0000:15/0000:15:01.0/0000:16:00.3", "0000:16:00.0");
  EXPECT_EQ(pci_place(sysfs.root(), "0000:16:00.3").function, "0000:16:00.3");
  EXPECT_EQ(pci_place(sysfs.root(), "0000:16:00.3").physical, "0000:16:00.0");
}

TEST(PciPlace, IsNotKnownWhereSysfsDoesNotHaveIt) {
  Sysfs sysfs;
  sysfs.add_class("net", "veth0", "virtual/net");
  for (const char* address : {"0000:18:00.0", "", "0000:18:00", "../net", "0000:18:00.0/.."})
    EXPECT_FALSE(pci_place(sysfs.root(), address).is_known()) << address;
  EXPECT_FALSE(pci_place(sysfs.root() / "nowhere", "0000:18:00.0").is_known());
  for (const char* name : {"veth0", "eth7", "", "../class"})
    EXPECT_FALSE(pci_place_in_class(sysfs.root(), "net", name).is_known()) << name;
}

TEST(PciPlace, IsNearerTheMoreOfTheWayIsSharedAndThenByTheNumaNode) {
  Sysfs sysfs;
  add_host(sysfs);
  const auto place = [&](const char* address) { return pci_place(sysfs.root(), address); };
  const PciPlace gpu = place("0000:18:00.0");
  const Nearness same_switch = nearness(gpu, place("0000:1a:00.0"));
  const Nearness same_node = nearness(gpu, place("0000:1e:00.0"));
  const Nearness other_node = nearness(gpu, place("0000:9a:00.0"));
  EXPECT_EQ(same_switch, (Nearness{3, true}));
  EXPECT_EQ(same_node, (Nearness{0, true}));
  EXPECT_EQ(other_node, (Nearness{0, false}));
  EXPECT_GT(same_switch, same_node);
  EXPECT_GT(same_node, other_node);
  EXPECT_EQ(nearness(gpu, PciPlace{}), other_node);
  // Buses whose numbers begin alike are not one way.
  EXPECT_EQ(nearness({.path = "pci0000:1/0000:01:00.0"}, {.path = "pci0000:15/0000:15:00.0"}),
            Nearness{});
}

// ---- The choice ----

Adapter at_place(const Sysfs& sysfs, const std::string& name, const std::string& address,
                 Link link = Link::up) {
  return {.provider = "verbs;ofi_rxm",
          .name = name,
          .address = "10.0.0.1",
          .place = pci_place(sysfs.root(), address),
          .link = link};
}

Strings names(std::span<const Adapter> adapters) {
  Strings found;
  for (const Adapter& adapter : adapters) found.push_back(adapter.name);
  return found;
}

TEST(NearestAdapters, AreThoseOfTheDevicesSwitchInAnOrderOfTheirOwn) {
  Sysfs sysfs;
  add_host(sysfs);
  std::vector<Adapter> all{
      at_place(sysfs, "mlx5_0", "0000:1b:00.0"), at_place(sysfs, "mlx5_1", "0000:1a:00.0"),
      at_place(sysfs, "mlx5_2", "0000:1e:00.0"), at_place(sysfs, "mlx5_3", "0000:9a:00.0")};
  const PciPlace gpu = pci_place(sysfs.root(), "0000:18:00.0");
  std::mt19937 random(testing::UnitTest::GetInstance()->random_seed());
  for (int i = 0; i < 20; ++i) {
    std::ranges::shuffle(all, random);
    EXPECT_EQ(names(net::nearest_adapters(gpu, "", all)), (Strings{"mlx5_1", "mlx5_0"}));
  }
}

TEST(NearestAdapters, AreThoseOfTheNumaNodeWhereNoneSharesTheRoot) {
  Sysfs sysfs;
  add_host(sysfs);
  const std::vector<Adapter> all{at_place(sysfs, "far", "0000:9a:00.0"),
                                 at_place(sysfs, "near", "0000:1e:00.0"),
                                 at_place(sysfs, "nowhere", "0000:ff:00.0")};
  const PciPlace gpu = pci_place(sysfs.root(), "0000:18:00.0");
  EXPECT_EQ(names(net::nearest_adapters(gpu, "", all)), Strings{"near"});
}

TEST(NearestAdapters, AreTheRanksOwnElseAllWhereTheirPlacesAreNotKnown) {
  const Sysfs sysfs;
  std::vector<Adapter> all{at_place(sysfs, "b", "0000:1a:00.0"),
                           at_place(sysfs, "a", "0000:1b:00.0")};
  all[0].address = "10.0.0.2";
  all[1].bits_per_second = all[0].bits_per_second = 400;
  const PciPlace gpu{.path = "pci0000:00/0000:01:00.0"};
  const auto near = [&](const char* control) {
    return names(net::nearest_adapters(gpu, control, all));
  };
  for (const char* control : {"", "10.0.0.9"}) EXPECT_EQ(near(control), (Strings{"a", "b"}));
  EXPECT_EQ(near("10.0.0.2"), Strings{"b"});
  all[0].bits_per_second = 25;
  EXPECT_EQ(near("10.0.0.2"), Strings{"b"});
  all[0].address = "";
  EXPECT_EQ(near(""), Strings{"a"});
}

TEST(NearestAdapters, AreTheFastestOfThoseEquallyNear) {
  Sysfs sysfs;
  add_host(sysfs);
  std::vector<Adapter> all{
      at_place(sysfs, "slow", "0000:1a:00.0"), at_place(sysfs, "unknown", "0000:1a:00.0"),
      at_place(sysfs, "first", "0000:1a:00.0"), at_place(sysfs, "second", "0000:1b:00.0"),
      at_place(sysfs, "far", "0000:9a:00.0")};
  for (const auto& [place, rate] : {std::pair(0, 25), {2, 400}, {3, 400}, {4, 800}})
    all[at(place)].bits_per_second = static_cast<std::uint64_t>(rate);
  const PciPlace gpu = pci_place(sysfs.root(), "0000:18:00.0");
  // Near ones have the rank's address without standing alone.
  for (const char* control : {"", "10.0.0.1"})
    EXPECT_EQ(names(net::nearest_adapters(gpu, control, all)), (Strings{"first", "second"}));
}

TEST(NearestAdapters, HaveTheirLinkUpAndAreNoVirtualOnesBesideThePhysical) {
  Sysfs sysfs;
  const std::string port = "pci0000:15/0000:15:01.0/";
  sysfs.add(port + "0000:16:00.0");
  sysfs.add(port + "0000:16:00.1");
  sysfs.add_virtual(port + "0000:16:00.2", "0000:16:00.0");
  sysfs.add_virtual(port + "0000:16:00.3", "0000:16:00.1");
  const std::vector<Adapter> all{at_place(sysfs, "physical", "0000:16:00.0"),
                                 at_place(sysfs, "off", "0000:16:00.1", Link::down),
                                 at_place(sysfs, "virtual", "0000:16:00.2"),
                                 at_place(sysfs, "lone", "0000:16:00.3")};
  EXPECT_EQ(names(net::nearest_adapters({.path = port + "x"}, "", all)),
            (Strings{"physical", "lone"}));
}

using Ids = std::vector<net::AdapterId>;
using Places = std::vector<std::size_t>;

TEST(SpreadOverAdapters, GivesEquallyNearOnesEquallyManyRanks) {
  const Ids four{{"a", "a"}, {"b", "b"}, {"c", "c"}, {"d", "d"}};
  const std::vector<Ids> eight(8, four);
  EXPECT_EQ(net::spread_over_adapters(eight), (Places{0, 1, 2, 3, 0, 1, 2, 3}));
}

TEST(SpreadOverAdapters, CountsPortsBeforeTheirVirtualFunctions) {
  const Ids ids{{"a1", "a"}, {"a2", "a"}, {"b1", "b"}};
  const std::vector<Ids> four(4, ids);
  EXPECT_EQ(net::spread_over_adapters(four), (Places{0, 2, 1, 2}));
}

TEST(SpreadOverAdapters, KnowsWhatOthersTakeThatHaveOtherLists) {
  const std::vector<Ids> ranks{
      {{"a", "a"}}, {}, {{"a", "a"}, {"b", "b"}}, {{"b", "b"}, {"a", "a"}}};
  EXPECT_EQ(net::spread_over_adapters(ranks), (Places{0, 0, 1, 0}));
}

// ---- With libfabric in the hands of the test ----

#ifdef FABRIC_FAKE_PATH
class FakeFabric : public testing::Test {
 protected:
  FakeFabric() : library_(net::load_fabric(FABRIC_FAKE_PATH)) {
    void* const handle = ::dlopen(FABRIC_FAKE_PATH, RTLD_NOW);
    const auto find = reinterpret_cast<FabricFakeFunction*>(::dlsym(handle, "fabric_fake"));
    fake_ = find();
    *fake_ = {};
    add_host(sysfs_);
    fake_->adapters = {{.provider = "tcp;ofi_rxm",
                        .fabric = "10.0.0.0/24",
                        .domain = "eth0",
                        .address = "10.0.0.1"},
                       rdma("mlx5_0", "0000:9a:00.0", "10.1.0.1"),
                       rdma("mlx5_1", "0000:9b:00.0", "10.2.0.1"),
                       rdma("mlx5_2", "0000:1a:00.0", "10.3.0.1"),
                       rdma("mlx5_3", "0000:1b:00.0", "10.4.0.1")};
  }
  static FakeAdapter rdma(const std::string& name, const std::string& pci,
                          const std::string& address) {
    return {.provider = "verbs;ofi_rxm",
            .fabric = "IB-0xfe80",
            .domain = name,
            .device = name,
            .address = address,
            .pci = pci,
            .link = 2,
            .speed = 400'000'000'000};
  }

  AdapterWish wish(const char* gpu = "") const {
    return {.name = "", .address = "10.0.0.1", .device = pci_place(sysfs_.root(), gpu)};
  }
  // "verbs;ofi_rxm mlx5_2 mlx5_3", a line for each provider.
  Strings choices(const AdapterWish& wish) const {
    Strings lines;
    for (const AdapterChoice& choice : choose_adapters(*library_, wish, sysfs_.root())) {
      lines.push_back(choice.provider);
      for (const Adapter& adapter : choice.adapters) lines.back() += " " + adapter.name;
    }
    return lines;
  }

  Sysfs sysfs_;
  const std::shared_ptr<const net::FabricLibrary> library_;
  FabricFake* fake_ = nullptr;
};

TEST_F(FakeFabric, TellsOfAdaptersWithTheirPlacesAndRates) {
  const auto found =
      net::fabric_adapters(*library_, "10.0.0.1", net::Where::anywhere, sysfs_.root());
  EXPECT_EQ(names(found), (Strings{"mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "eth0"}));
  EXPECT_EQ(found[2].place.function, "0000:1a:00.0");
  EXPECT_EQ(found[2].place.numa_node, 0);
  EXPECT_EQ(found[2].bits_per_second, 400'000'000'000U);
  EXPECT_EQ(found[2].address, "10.3.0.1");
  EXPECT_EQ(found[2].link, Link::up);
  EXPECT_EQ(found[4].link, Link::unknown);
}

// Providers of 1.17 tell of no bus.
TEST_F(FakeFabric, FindsAPlaceByTheAdaptersName) {
  fake_->adapters = {rdma("mlx5_9", "", "10.1.0.1")};
  sysfs_.add_class("infiniband", "mlx5_9", "pci0000:1d/0000:1d:00.0/0000:1e:00.0");
  const auto found =
      net::fabric_adapters(*library_, "10.0.0.1", net::Where::anywhere, sysfs_.root());
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].place.function, "0000:1e:00.0");
}

TEST_F(FakeFabric, ARankOfAGpuMayTakeTheNearestAdaptersOrItsInterface) {
  EXPECT_EQ(choices(wish("0000:18:00.0")),
            (Strings{"verbs;ofi_rxm mlx5_2 mlx5_3", "tcp;ofi_rxm eth0"}));
  EXPECT_EQ(choices(wish("0000:99:00.0")),
            (Strings{"verbs;ofi_rxm mlx5_0 mlx5_1", "tcp;ofi_rxm eth0"}));
}

TEST_F(FakeFabric, ARankWhosePlaceIsNotKnownStaysOnItsInterface) {
  EXPECT_EQ(choices(wish()), Strings{"tcp;ofi_rxm eth0"});
  EXPECT_EQ(fake_->calls, Strings{"getinfo  from 10.0.0.1"});
  AdapterWish by_address = wish();
  by_address.address = "10.2.0.1";
  EXPECT_EQ(choices(by_address), Strings{"verbs;ofi_rxm mlx5_1"});
  by_address.device = {.path = "pci0000:ff/0000:ff:00.0"};  // nothing is near it
  EXPECT_EQ(choices(by_address), Strings{"verbs;ofi_rxm mlx5_1"});
}

TEST_F(FakeFabric, ANamedInterfaceGoesBeforeTheNearestAdapter) {
  AdapterWish named = wish("0000:18:00.0");
  named.names_interface = true;
  EXPECT_EQ(choices(named), Strings{"tcp;ofi_rxm eth0"});
  named.address = "10.2.0.1";
  EXPECT_EQ(choices(named), Strings{"verbs;ofi_rxm mlx5_1"});
}

TEST_F(FakeFabric, ANamedAdapterGoesBeforeAll) {
  for (const bool names_interface : {false, true}) {
    for (const char* gpu : {"", "0000:18:00.0"}) {
      AdapterWish named = wish(gpu);
      named.names_interface = names_interface;
      named.name = "mlx5_1";
      EXPECT_EQ(choices(named), Strings{"verbs;ofi_rxm mlx5_1"});
      named.name = "eth0";
      EXPECT_EQ(choices(named), Strings{"tcp;ofi_rxm eth0"});
    }
  }
}

TEST_F(FakeFabric, ANameThatIsNoneIsRefusedWithThoseThatThereAre) {
  AdapterWish named = wish("0000:18:00.0");
  for (const char* name : {"mlx5_9", "mlx5", "mlx5_*", "MLX5_0"}) {
    named.name = name;
    expect_error(error_of([&] { choices(named); }), XD_ERROR_INVALID_ARGUMENT,
                 {std::string("XD_NET_DEVICE = ") + name +
                  ", expected an adapter that libfabric "
                  "can use here: mlx5_0 (verbs;ofi_rxm), mlx5_1 (verbs;ofi_rxm), mlx5_2 "
                  "(verbs;ofi_rxm), mlx5_3 (verbs;ofi_rxm), eth0 (tcp;ofi_rxm)"});
  }
}

TEST_F(FakeFabric, AnAdapterOfTheOtherFamilyIsNotChosenAndNotTaken) {
  fake_->adapters = {rdma("mlx5_0", "0000:1a:00.0", "fd00::1"),
                     rdma("mlx5_1", "0000:9a:00.0", "10.2.0.1")};
  EXPECT_EQ(choices(wish("0000:18:00.0")), Strings{"verbs;ofi_rxm mlx5_1"});
  AdapterWish named = wish();
  named.name = "mlx5_0";
  expect_error(error_of([&] { choices(named); }), XD_ERROR_INVALID_ARGUMENT,
               "XD_NET_DEVICE = mlx5_0, whose address is fd00::1, expected an adapter with an "
               "address of the family of 10.0.0.1");
}

TEST_F(FakeFabric, OfAnAdaptersAddressesTheOneOfTheRankIsTakenElseOneOfItsFamily) {
  const auto address_of = [&](const char* control) {
    return net::fabric_adapters(*library_, control, net::Where::anywhere, sysfs_.root())
        .front()
        .address;
  };
  fake_->adapters = {rdma("mlx5_0", "", "fd00::1"),  rdma("mlx5_0", "", "10.1.0.1"),
                     rdma("mlx5_0", "", "10.1.0.2"), rdma("mlx5_0", "", "fe80::1"),
                     rdma("mlx5_1", "", "0.0.0.0"),  rdma("mlx5_1", "", "fe80::2")};
  EXPECT_EQ(address_of("10.0.0.1"), "10.1.0.1");
  EXPECT_EQ(address_of("10.1.0.2"), "10.1.0.2");
  EXPECT_EQ(address_of("fd00::7"), "fd00::1");
  // The second one cannot be reached from elsewhere.
  EXPECT_EQ(names(net::fabric_adapters(*library_, "", net::Where::anywhere, sysfs_.root())),
            Strings{"mlx5_0"});
}

TEST_F(FakeFabric, AnAdapterWithTheAddressOfOneWhoseNameBeginsItsOwnIsLeftOut) {
  const auto found = [&] {
    return names(net::fabric_adapters(*library_, "", net::Where::anywhere, sysfs_.root()));
  };
  fake_->adapters = {rdma("mlx5_10", "", "10.2.0.1"), rdma("mlx5_1", "", "10.2.0.1"),
                     rdma("mlx5_2", "", "10.2.0.1"),  rdma("mlx5_20", "", "10.3.0.1"),
                     rdma("mlx5_3", "", ""),          rdma("mlx5_30", "", "")};
  EXPECT_EQ(found(), (Strings{"mlx5_1", "mlx5_2", "mlx5_20", "mlx5_3", "mlx5_30"}));
  // Both providers of one interface have its address.
  fake_->adapters = {rdma("mlx5_10", "", "10.2.0.1"), rdma("mlx5_1", "", "10.2.0.1")};
  fake_->adapters[1].provider = "tcp;ofi_rxm";
  EXPECT_EQ(found(), (Strings{"mlx5_10", "mlx5_1"}));
}

TEST_F(FakeFabric, EfaIsTakenByTheFabricOfItsName) {
  const auto efa = [](const char* fabric) {
    return FakeAdapter{.provider = "efa",
                       .fabric = fabric,
                       .domain = "rdmap16s27-rdm",
                       .device = "rdmap16s27",
                       .pci = "0000:1a:00.0"};
  };
  fake_->adapters.push_back(efa("efa-direct"));
  EXPECT_EQ(choices(wish("0000:18:00.0"))[0], "verbs;ofi_rxm mlx5_2 mlx5_3");
  fake_->adapters.push_back(efa("efa"));
  EXPECT_EQ(choices(wish("0000:18:00.0")),
            (Strings{"efa rdmap16s27-rdm", "verbs;ofi_rxm mlx5_2 mlx5_3", "tcp;ofi_rxm eth0"}));
  // It has no interface of IP, so an interface that is named rules it out.
  AdapterWish named = wish("0000:18:00.0");
  named.names_interface = true;
  EXPECT_EQ(choices(named), Strings{"tcp;ofi_rxm eth0"});
  for (const char* name : {"rdmap16s27", "rdmap16s27-rdm"}) {
    named.name = name;
    EXPECT_EQ(choices(named), Strings{"efa rdmap16s27-rdm"});
  }
}

// Every rank reads what all have offered.
TEST_F(FakeFabric, RanksOfAMachineShareNoAdapterWhereThereAreEnough) {
  std::vector<std::vector<AdapterChoice>> choices;
  std::vector<std::vector<OfferedAdapters>> offers;
  for (const char* gpu : {"0000:18:00.0", "0000:19:00.0", "0000:98:00.0", "0000:99:00.0"}) {
    choices.push_back(choose_adapters(*library_, wish(gpu), sysfs_.root()));
    offers.push_back(read_offer(write_offer(choices.back()), static_cast<int>(offers.size())));
  }
  Strings taken;
  for (int rank = 0; rank < 4; ++rank) {
    const HostMap hosts(rank, 4);
    const std::size_t place = place_of_adapter(hosts, "verbs;ofi_rxm", offers);
    taken.push_back(choices[at(rank)].front().adapters[place].name);
    EXPECT_EQ(place_of_adapter(hosts, "tcp;ofi_rxm", offers), 0U);
  }
  EXPECT_EQ(taken, (Strings{"mlx5_2", "mlx5_3", "mlx5_0", "mlx5_1"}));
}

// As `crossdock doctor` does.
TEST_F(FakeFabric, TheListSaysWhichDevicesWouldTakeWhichAdapter) {
  std::vector<PciPlace> devices;
  for (const char* gpu : {"0000:98:00.0", "0000:18:00.0", "0000:19:00.0", "0000:ff:00.0"})
    devices.push_back(pci_place(sysfs_.root(), gpu));
  fake_->adapters.push_back({.provider = "tcp",
                             .fabric = "10.0.0.0/24",
                             .domain = "eth0",
                             .device = "",
                             .address = "10.0.0.1"});
  const auto listed = [&](const AdapterWish& wish) {
    Strings lines;
    for (const ListedAdapter& one : list_adapters(*library_, wish, devices, sysfs_.root()))
      lines.push_back(concat(one.adapter.name, " ", one.adapter.provider, " ", one.cuda_devices));
    return lines;
  };
  AdapterWish all;  // the address at which ranks will meet is not known
  fake_->calls.clear();
  EXPECT_EQ(listed(all),
            (Strings{"mlx5_0 verbs;ofi_rxm 1", "mlx5_1 verbs;ofi_rxm 0", "mlx5_2 verbs;ofi_rxm 2",
                     "mlx5_3 verbs;ofi_rxm 4", "eth0 tcp 0"}));
  EXPECT_EQ(fake_->calls.size(), 1U);
  all.address = "10.2.0.1";
  all.names_interface = true;
  EXPECT_EQ(listed(all)[1], "mlx5_1 verbs;ofi_rxm 15");
  all.name = "eth0";
  EXPECT_EQ(listed(all)[4], "eth0 tcp 15");
  all.name = "eth9";
  devices.clear();
  expect_error(error_of([&] { listed(all); }), XD_ERROR_INVALID_ARGUMENT, "XD_NET_DEVICE = eth9");
}

TEST_F(FakeFabric, AnOfferThatCannotBeReadNamesItsRank) {
  Bytes offer = write_offer(choose_adapters(*library_, wish("0000:18:00.0"), sysfs_.root()));
  EXPECT_EQ(read_offer(offer, 1).size(), 2U);
  offer.pop_back();
  expect_error(error_of([&] { read_offer(offer, 3); }), XD_ERROR_MISMATCH,
               "rank 3 offers its adapters in");
}

TEST_F(FakeFabric, AnAdapterIsOpenedByItsAddressItsProviderAndItsName) {
  fake_->adapters.push_back(
      {.provider = "efa", .fabric = "efa", .domain = "rdmap16s27-rdm", .device = "rdmap16s27"});
  for (const Adapter& adapter :
       {Adapter{.provider = "verbs;ofi_rxm", .name = "mlx5_1", .address = "10.2.0.1"},
        Adapter{.provider = "efa", .name = "rdmap16s27-rdm"}}) {
    fake_->calls.clear();
    expect_error(error_of([&] { net::open_fabric(library_, adapter); }), XD_ERROR_SYSTEM,
                 "fi_fabric: fake reason");
    const bool is_efa = adapter.provider == "efa";
    EXPECT_EQ(
        fake_->calls,
        (Strings{"getinfo " + adapter.provider + " from " + (is_efa ? "anywhere" : "10.2.0.1"),
                 "fabric " + adapter.provider + (is_efa ? " efa" : " IB-0xfe80")}));
  }
  expect_error(
      error_of([&] { net::open_fabric(library_, {.provider = "efa", .name = "rdmap9s27-rdm"}); }),
      XD_ERROR_SYSTEM, "has no provider efa for rdmap9s27-rdm");
}

// Its name was that of an interface which was down when a rank looked.
TEST_F(FakeFabric, AnInterfaceIsOpenedByItsAddressAlone) {
  for (const char* name : {"eth0", "tcp"}) {
    const Adapter adapter{.provider = "tcp;ofi_rxm", .name = name, .address = "10.0.0.1"};
    expect_error(error_of([&] { net::open_fabric(library_, adapter); }), XD_ERROR_SYSTEM,
                 "fi_fabric: fake reason");
  }
}
#endif

}  // namespace
}  // namespace xd::test
