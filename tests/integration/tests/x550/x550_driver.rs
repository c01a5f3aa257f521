//! The PF of an X550 without VFs, as ixgbe and `ethtool` see it, and its interrupts and resets.

use integration::{ETHTOOL, IP, Kernel, X550};
use rstest::rstest;

/// The name of a register and the link speed, as `ethtool -d` explains them.
const REGISTERS: [&str; 3] = ["(Device Control)", "LINKS (Link Status register)", "10G"];

/// Checks the answers of `ethtool` about the PF, in all its forms.
fn assert_ethtool_reads_the_pf(nic: &mut X550) {
    let interface = nic.interface();
    let mut ethtool = |arguments: &str| nic.guest.ok(&format!("{ETHTOOL} {arguments}"));
    let link = ethtool(interface);
    assert!(
        ["Speed: 10000Mb/s", "Duplex: Full", "Link detected: yes"].iter().all(|part| link.contains(part)),
        "{link}"
    );
    let driver = ethtool(&format!("-i {interface}"));
    assert!(driver.contains("driver: ixgbe\n") && driver.contains("bus-info: 0000:00:01.0"), "{driver}");
    let firmware = driver.lines().find_map(|line| line.strip_prefix("firmware-version: "));
    assert!(firmware.is_some_and(|version| version.starts_with("0x")), "{driver}");
    let registers = ethtool(&format!("-d {interface}"));
    assert!(REGISTERS.iter().all(|part| registers.contains(part)), "{registers}");
    for option in ["-g", "-k", "-l", "-c", "-a", "-n", "-x", "-T"] {
        ethtool(&format!("{option} {interface}"));
    }
    let address = ethtool(&format!("-P {interface}"));
    assert_eq!(address, format!("Permanent address: {}", X550::MAC));
}

/// The link is down while the host's tap is.
fn assert_link_follows_the_uplink(nic: &mut X550) {
    let interface = nic.interface();
    for up in [false, true] {
        nic.set_uplink(up);
        nic.guest.await_carrier(interface, up);
        let shown = nic.guest.ok(&format!("{IP} link show {interface}"));
        assert_eq!(shown.contains("NO-CARRIER"), !up, "{shown}");
    }
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::Generic6_1)]
#[case::linux_6_12(Kernel::Generic)]
#[ignore = "a longer test: a third kernel, which is fetched for it"]
#[case::linux_backports(Kernel::GenericBackports)]
fn ixgbe_probes_an_x550_whose_link_is_up_at_10_gbit_s(#[case] kernel: Kernel) {
    let mut nic = X550::boot(kernel, 4);
    assert_eq!(nic.reachability(&[]), X550::everyone(0));
    nic.guest.assert_x550_has_no_complaint();
    assert_ethtool_reads_the_pf(&mut nic);
    let (sent, received) = (nic.statistic("tx_packets"), nic.statistic("rx_packets"));
    assert!(nic.reaches(&X550::UPLINK.to_string()));
    assert!(nic.statistic("tx_packets") >= sent + 3 && nic.statistic("rx_packets") >= received + 3);
    assert_link_follows_the_uplink(&mut nic);
    // A copper port has no module: the driver says so, as on hardware.
    let interface = nic.interface();
    assert_ne!(nic.guest.run(&format!("{ETHTOOL} -m {interface}")).status, 0);

    // Down and up, a reset by sysfs, another driver's life, and a larger frame.
    nic.guest.ok(&format!("ip link set {interface} down"));
    nic.guest.join_x550();
    assert!(nic.reaches(&X550::UPLINK.to_string()));
    let address = nic.pf.address.clone();
    nic.guest.unbind(&address);
    nic.guest.ok(&format!("echo 1 > {}", nic.pf.file("reset")));
    nic.guest.bind_to("ixgbe", &address);
    nic.guest.join_x550();
    assert!(nic.reaches(&X550::UPLINK.to_string()));
    nic.guest.ok("rmmod ixgbe");
    nic.guest.load_x550();
    nic.guest.join_x550();
    assert!(nic.reaches(&X550::UPLINK.to_string()));
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}

#[test]
fn a_reboot_leaves_an_x550_usable() {
    let mut nic = X550::boot(Kernel::Generic, 2);
    let vfs = nic.enable(2);
    nic.guest.reboot();
    assert_eq!(nic.pf.vfs(&mut nic.guest), [], "VFs of the kernel before");
    nic.guest.load_x550();
    nic.guest.join_x550();
    assert_eq!(nic.enable(2).len(), vfs.len());
    assert!(nic.reaches(&X550::UPLINK.to_string()));
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}

/// An X540 has IDs, PHY, flash and RSS of its own.
#[test]
#[ignore = "a longer test: another model of the NIC"]
fn ixgbe_drives_an_x540_with_two_vfs() {
    let mut nic = X550::boot_x540(Kernel::Generic, 2);
    let tenants = nic.tenants(2);
    let ids = nic.guest.ok("cd /sys/bus/pci/devices; cat 0000:00:01.0/device 0000:01:00.0/device 0000:01:00.1/device");
    assert_eq!(ids.lines().collect::<Vec<_>>(), ["0x1528", "0x1515", "0x1515"]);
    assert_ethtool_reads_the_pf(&mut nic);
    assert_eq!(nic.reachability(&tenants), X550::everyone(2));
    nic.set("vf 0 vlan 7 qos 5");
    assert_eq!(nic.reachability(&tenants), [".-++", "-.--", "+-.+", "+-+."]);
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}

/// The driver's own tests write patterns to registers, and read them back.
#[test]
#[ignore = "a longer test: of the driver's tests, which reset the PF"]
fn the_tests_of_ixgbe_pass() {
    let mut nic = X550::boot(Kernel::Generic, 0);
    let interface = nic.interface();
    let told = nic.guest.run(&format!("{ETHTOOL} -t {interface} offline"));
    println!("{}", told.text);
    let passed = |name: &str| {
        let line = told.text.lines().find(|line| line.starts_with(name));
        line.is_some_and(|line| line.trim_end().ends_with('0'))
    };
    for name in ["Register test", "Eeprom test", "Interrupt test", "Loopback test", "Link test"] {
        assert!(passed(name), "{name}: {}", told.text);
    }
    nic.guest.await_carrier(interface, true);
    assert!(nic.reaches(&X550::UPLINK.to_string()));
    assert_eq!(nic.guest.power_off().code, Some(0));
}
