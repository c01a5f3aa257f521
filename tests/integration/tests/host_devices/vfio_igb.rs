//! The host's SR-IOV NIC in a guest: an igb of the first-level machine, and its VFs.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::thread;
use std::time::{Duration, Instant};

use integration::{
    Api, Guest, GuestSpec, HostNic, HostTap, Kernel, KvmTrace, Pf, Subnet, for_each_boot, record_exits, repetitions,
    spec_with_vfs, vf_taps,
};
use rstest::rstest;
use serde_json::{Value, json};

/// Time that a transfer of 8 MiB may take.
const TRANSFER: Duration = Duration::from_secs(180);
/// Capabilities that are hidden from guests: `lspci` shows none of them.
const HIDDEN: [&str; 10] = [
    "SR-IOV",
    "Alternative Routing-ID",
    "Resizable BAR",
    "Address Translation Service",
    "Page Request",
    "Process Address Space",
    "Access Control Services",
    "Latency Tolerance",
    "Transaction Processing Hints",
    "Multicast",
];

fn guest(spec: GuestSpec, api: &Api, device: &str) -> Guest {
    Guest::boot(spec.arguments(&["--api-socket", &api.argument(), "--device", device]))
}

/// The interrupts of the guest's `interface`.
fn interrupts(guest: &mut Guest, interface: &str) -> u64 {
    let sum = format!("awk '/{interface}/ {{ n += $2 }} END {{ print n + 0 }}' /proc/interrupts");
    guest.ok(&sum).trim().parse().unwrap()
}

/// The address of the device behind the guest's `interface`.
fn address(guest: &mut Guest, interface: &str) -> String {
    guest.ok(&format!("basename $(readlink -f /sys/class/net/{interface}/device)")).trim().to_string()
}

/// Checks that `lspci` shows a host device with `wanted`.
fn check_lspci(guest: &mut Guest, interface: &str, wanted: &[&str]) {
    let address = address(guest, interface);
    let shown = guest.ok(&format!("lspci -vv -s {address}"));
    assert!(HIDDEN.iter().all(|name| !shown.contains(name)), "{shown}");
    assert!(wanted.iter().all(|name| shown.contains(name)), "{shown}");
}

/// Sends `bytes` bytes and compares the echo.
fn transfer(guest: &mut Guest, nic: &HostNic, bytes: usize) {
    guest.ok(&format!("head -c {bytes} /dev/urandom > /tmp/sent"));
    guest.ok_within(&nic.echo("/tmp/sent"), TRANSFER);
}

/// Moves BAR 0 of a device without driver, like a kernel that rearranges BARs, and back again. A register at `register`
/// reads the same at each place.
fn move_bar(guest: &mut Guest, address: &str, register: u64) {
    let device = format!("/sys/bus/pci/devices/{address}");
    let line = guest.ok(&format!("head -n 1 {device}/resource"));
    let number = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap();
    let words: Vec<_> = line.split_whitespace().map(number).collect();
    let (start, size) = (words[0], words[1] - words[0] + 1);
    // No other BAR is so far after the last one.
    let other = start + 64 * size;
    let write = |guest: &mut Guest, offset: u64, bytes: &[u8]| {
        let text: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
        guest.ok(&format!("printf '{text}' | dd of={device}/config bs=1 seek={offset} conv=notrunc 2> /dev/null"));
    };
    let read = |guest: &mut Guest, at: u64| guest.ok(&format!("devmem {:#x} 32", at + register)).trim().to_string();
    let place = |guest: &mut Guest, at: u64| {
        write(guest, 4, &[0, 0]);
        write(guest, 0x10, &(at as u32).to_le_bytes());
        write(guest, 0x14, &((at >> 32) as u32).to_le_bytes());
        write(guest, 4, &[6, 0]);
    };
    place(guest, start);
    let value = read(guest, start);
    assert_ne!(value, "0xFFFFFFFF");
    place(guest, other);
    assert_eq!([read(guest, other), read(guest, start)], [value.clone(), "0xFFFFFFFF".to_string()]);
    place(guest, start);
    assert_eq!([read(guest, start), read(guest, other)], [value, "0xFFFFFFFF".to_string()]);
}

#[rstest]
#[case::linux_6_12(Kernel::Generic)]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::Generic6_1)]
fn a_host_vf_works_after_flr_moved_bars_reboot_and_new_memory(#[case] kernel: Kernel) {
    let vfs = HostNic::igb_vfs();
    let api = Api::new("vfio-igb");
    let spec = GuestSpec::new(kernel).with_lspci().memory("size=320M,hotplug_size=256M");
    // The guest restarts through a triple fault.
    let mut guest = guest(spec.kernel_argument("reboot=t"), &api, &vfs[0].option(",id=nic"));
    let before = interrupts(&mut guest, "eth0");
    vfs[0].join(&mut guest, "eth0");
    assert!(interrupts(&mut guest, "eth0") >= before + 6, "MSI-X");
    transfer(&mut guest, &vfs[0], 8 << 20);
    check_lspci(&mut guest, "eth0", &["Virtual Function", "MSI-X: Enable+", "Express", "Kernel driver in use: igbvf"]);
    // Linux's driver hangs when its function is reset while its interface is down.
    let address = address(&mut guest, "eth0");
    guest.ok(&format!("echo {address} > /sys/bus/pci/drivers/igbvf/unbind"));
    guest.ok(&format!("echo 1 > /sys/bus/pci/devices/{address}/reset"));
    move_bar(&mut guest, &address, 0x8);
    guest.ok(&format!("echo {address} > /sys/bus/pci/drivers/igbvf/bind"));
    vfs[0].join(&mut guest, "eth0");
    guest.reboot();
    vfs[0].join(&mut guest, "eth0");
    // Added memory is above 4 GiB, in the zone from which the kernel allocates its packets.
    let locked = guest.vmm().held().1;
    assert_eq!(api.put_json("vm.resize", &json!({"desired_ram": 576 << 20})).status, 204);
    assert_ne!(guest.vmm().held().1, locked, "what is added is pinned");
    let online = "for m in /sys/devices/system/memory/memory*/state; do echo online > $m; done";
    guest.wait_for(&format!("{online}; [ $(awk '/MemTotal/ {{ print $2 }}' /proc/meminfo) -gt 400000 ]"));
    let taken = |guest: &mut Guest| -> u64 {
        guest.ok("awk '/pgalloc_normal/ { print $2 }' /proc/vmstat").trim().parse().unwrap()
    };
    let before = taken(&mut guest);
    transfer(&mut guest, &vfs[0], 1 << 20);
    assert!(taken(&mut guest) > before + 200, "pages of what was added");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[test]
fn a_host_pf_hides_its_vfs_and_survives_suspend_in_a_guest() {
    let igb = HostNic::igb();
    let api = Api::new("vfio-pf");
    let mut guest = guest(GuestSpec::new(Kernel::Generic).with_lspci(), &api, &igb.option(",id=nic"));
    igb.join(&mut guest, "eth0");
    let wanted = ["82576", "Power Management", "MSI-X: Enable+", "Express", "Kernel driver in use: igb"];
    check_lspci(&mut guest, "eth0", &wanted);
    let address = address(&mut guest, "eth0");
    guest.ok(&format!("[ ! -e /sys/bus/pci/devices/{address}/sriov_totalvfs ]"));
    guest.suspend_and_wake();
    igb.join(&mut guest, "eth0");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// Adds a device, and queries the VM's counters in the meantime. Returns the number of answers that arrived before the
/// device was added.
fn add_and_ask(api: &Api, device: &Value) -> usize {
    thread::scope(|scope| {
        let adding = scope.spawn(|| (api.put_json("vm.add-device", device), Instant::now()));
        let mut answers = Vec::new();
        while !adding.is_finished() {
            assert_eq!(api.get("vm.counters").status, 200);
            answers.push(Instant::now());
        }
        let (added, end) = adding.join().unwrap();
        assert_eq!(added.status, 200, "{added:?}");
        answers.into_iter().filter(|answer| *answer < end).count()
    })
}

#[rstest]
#[case::a_few_times(5)]
#[ignore = "a longer test: more rounds"]
#[case::many_times(20)]
fn host_vfs_added_and_removed_under_traffic_leak_nothing(#[case] rounds: usize) {
    record_exits();
    let rounds = repetitions("CH_VFIO_ROUNDS", rounds);
    for_each_boot(|| come_and_go(rounds));
}

/// Boots a guest, and adds and removes VFs of the host `rounds` times.
fn come_and_go(rounds: usize) {
    let vfs = HostNic::igb_vfs();
    let (api, mut trace) = (Api::new("vfio-plug"), KvmTrace::start());
    let mut guest = Guest::boot(spec_with_vfs(Kernel::Generic, 2).arguments(&["--api-socket", &api.argument()]));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 2);
    let own = pf.vfs(&mut guest).remove(1);
    vf_taps(2)[1].join(Subnet(1));
    guest.join(own.interface(), Subnet(1));
    let mut first = None;
    for round in 0..rounds {
        let nic = &vfs[round % 2];
        let answers = add_and_ask(&api, &json!({"path": nic.folder(), "id": "nic"}));
        assert!(answers >= 1, "the API answered {answers} times while all memory was pinned");
        let twice = api.put_json("vm.add-device", &json!({"path": nic.folder().join("."), "id": "again"}));
        assert_eq!(twice.status, 409, "{twice:?}");
        let name = "$(basename $(ls -d /sys/bus/pci/drivers/igbvf/0*/net/*))";
        guest.wait_for(&format!("[ -n \"{name}\" ]"));
        let interface = guest.ok(&format!("echo {name}")).trim().to_string();
        nic.join(&mut guest, &interface);
        guest.ping(own.interface(), Subnet(1));
        guest.ok(&nic.flood());
        assert_eq!(api.put_json("vm.remove-device", &json!({"id": "nic"})).status, 204);
        api.await_removal("nic");
        // `ping` ends when its interface is removed.
        guest.run("killall ping");
        guest.ping(own.interface(), Subnet(1));
        assert!(!guest.vmm().has_bar_mapped());
        // Also memory slots, routes and eventfds.
        let now = (guest.vmm().held(), trace.objects());
        assert_eq!(first.get_or_insert_with(|| now.clone()), &now, "round {round}");
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[test]
fn a_host_vf_behind_the_guests_iommu_reaches_only_its_mappings() {
    let vfs = HostNic::igb_vfs();
    let api = Api::new("vfio-iommu");
    let spec = GuestSpec::new(Kernel::Generic).with_modules().kernel_argument("iommu.strict=1");
    let mut guest = guest(spec, &api, &vfs[0].option(",id=nic,iommu=on"));
    let locked = |guest: &Guest| -> u64 {
        let line = guest.vmm().held().1;
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    assert!(locked(&guest) >= 256 << 10, "it reaches all memory until the guest has a driver of its IOMMU");
    guest.load("virtio_iommu");
    guest.wait_for("[ -e /sys/class/net/eth0 ]");
    vfs[0].join(&mut guest, "eth0");
    transfer(&mut guest, &vfs[0], 256 << 10);
    assert!(locked(&guest) < 64 << 10, "{} KiB are within reach", locked(&guest));
    let maps = |api: &Api, name: &str| api.get("vm.counters").body["__iommu"][name].as_u64().unwrap();
    let (mapped, unmapped) = (maps(&api, "maps"), maps(&api, "unmaps"));
    assert!(mapped > 300 && unmapped > 200, "{mapped} maps and {unmapped} unmaps");
    assert_eq!(api.get("vm.counters").body["nic"]["map_failures"], 0);
    let address = address(&mut guest, "eth0");
    guest.ok(&format!("echo {address} > /sys/bus/pci/drivers/igbvf/unbind"));
    assert!(locked(&guest) < 1 << 10, "{} KiB are mapped without a device", locked(&guest));
    guest.ok(&format!("echo {address} > /sys/bus/pci/drivers/igbvf/bind"));
    vfs[0].join(&mut guest, "eth0");
    guest.reboot();
    assert!(locked(&guest) >= 256 << 10, "as at first");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// The guest's network interface whose lower devices are a standby NIC and, while it exists, another.
const FAILOVER: &str = "$(basename $(dirname $(ls -d /sys/class/net/*/lower_* | head -n 1)))";

#[test]
#[ignore = "a longer test: a guest of its own, and a second on an emulated machine"]
fn a_standby_nic_takes_over_in_a_second_when_its_vf_is_removed() {
    let vfs = HostNic::igb_vfs();
    let api = Api::new("vfio-standby");
    // Both lead to 10.2.0.1, which has the same MAC address on either path, so no ARP request is needed.
    let tap = "id=standby,tap=vfiosb,ip=10.2.0.1,mask=255.255.255.0,host_mac=52:55:0a:02:00:01";
    let spec = GuestSpec::new(Kernel::Generic).net(&format!("{tap},mac={},standby=on", HostNic::vf_mac(0)));
    let mut guest = guest(spec, &api, &vfs[0].option(",id=vf"));
    let master = guest.ok(&format!("echo {FAILOVER}")).trim().to_string();
    let lower = |guest: &mut Guest, count: usize| {
        guest.wait_for(&format!("[ $(ls -d /sys/class/net/{master}/lower_* | wc -l) = {count} ]"));
    };
    lower(&mut guest, 2);
    vfs[0].join(&mut guest, &master);
    let tap = HostTap::existing("vfiosb");
    let carried = |tap: &HostTap| tap.counters().from_guest;
    let before = carried(&tap);
    guest.ok("ping -q -i 0.1 10.2.0.1 > /tmp/pings 2>&1 &");
    guest.ok("sleep 2");
    assert!(carried(&tap) < before + 5, "the VF carries it");
    api.remove_device("vf");
    lower(&mut guest, 1);
    guest.ok("sleep 2; killall -INT ping");
    assert!(carried(&tap) > before + 10, "the NIC in standby carries it");
    let text = guest.ok("grep transmitted /tmp/pings");
    println!("{text}");
    assert!(unanswered(&text) < 10, "within a second: {text}");
    let added = api.put_json("vm.add-device", &json!({"path": vfs[0].folder(), "id": "vf"}));
    assert_eq!(added.status, 200, "{added:?}");
    lower(&mut guest, 2);
    guest.ok("sleep 4");
    let before = carried(&tap);
    guest.ok("ping -q -i 0.1 -c 20 10.2.0.1");
    assert!(carried(&tap) < before + 5, "the VF carries it again");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// Number of unanswered pings, from the summary of `ping`.
fn unanswered(text: &str) -> u64 {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse::<u64>().ok());
    let (sent, answered) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    sent - answered
}
