//! Rules for frames that a guest has its X550 carry out: `ethtool -N`, and `tc` with the filter u32.

#![expect(clippy::expect_used, reason = "a test fails by panicking, also in its helpers")]

use std::net::UdpSocket;

use integration::{ETHTOOL, Kernel, TC, X550};

/// Datagrams for a port: more than others that arrive in the meantime.
const DATAGRAMS: u64 = 20;

/// Sends datagrams to `port` of the PF's address. Returns how many frames the PF's driver has received.
#[track_caller]
fn arrive(nic: &mut X550, port: u16) -> u64 {
    let before = nic.statistic("rx_packets");
    let host = UdpSocket::bind((X550::UPLINK, 0)).expect("the uplink has an address");
    for _ in 0..DATAGRAMS {
        host.send_to(b"rule", (X550::PF, port)).expect("the host sends");
    }
    // The PF's own ping passes behind them.
    assert!(nic.reaches(&X550::UPLINK.to_string()));
    nic.statistic("rx_packets") - before
}

#[test]
#[ignore = "a longer test: unit tests have each rule"]
fn an_x550_carries_out_rules_of_ethtool() {
    let mut nic = X550::boot(Kernel::Generic, 1);
    let tenants = nic.tenants(1);
    let interface = nic.interface();
    assert!(arrive(&mut nic, 9999) >= DATAGRAMS);
    nic.restart_of(0, &format!("{ETHTOOL} -K {interface} ntuple on"));
    nic.guest.await_carrier(interface, true);
    nic.guest.ok(&format!("{ETHTOOL} -N {interface} flow-type udp4 dst-port 9999 action -1 loc 1"));
    assert!(arrive(&mut nic, 9999) < DATAGRAMS, "they are dropped");
    assert!(arrive(&mut nic, 9998) >= DATAGRAMS, "others are not");
    nic.guest.ok(&format!("{ETHTOOL} -N {interface} delete 1"));
    assert!(arrive(&mut nic, 9999) >= DATAGRAMS);

    // To VF 0: its driver counts what the host sends to the PF. For further VFs, ixgbe takes the number of its own
    // queues for that of a VF's: it needs as many processors as a VF has queues.
    nic.guest.ok(&format!("{ETHTOOL} -N {interface} flow-type udp4 dst-port 9999 vf 0 queue 0 loc 2"));
    tenants[0].await_carrier(&mut nic.guest, true);
    let before = tenants[0].count(&mut nic.guest, "rx", "packets");
    assert!(arrive(&mut nic, 9999) < DATAGRAMS);
    assert!(tenants[0].count(&mut nic.guest, "rx", "packets") >= before + DATAGRAMS);
    nic.guest.ok(&format!("{ETHTOOL} -N {interface} delete 2"));
    assert!(arrive(&mut nic, 9999) >= DATAGRAMS);
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}

/// The filters of u32 that match UDP datagrams for port 9999 and do `action`. The driver reads a protocol's fields from
/// a table of its own, to which one for all IPv4 packets links.
fn filters(interface: &str, action: &str) -> [String; 3] {
    let filter = format!("{TC} filter add dev {interface} parent ffff: protocol ip prio 9");
    let link = "link 1: offset at 0 mask 0f00 shift 6 plus 0 eat match ip protocol 17 ff";
    [
        format!("{filter} handle 1: u32 divisor 1"),
        format!("{filter} handle 800:0:10 u32 ht 800: {link}"),
        format!("{filter} handle 1:0:10 u32 ht 1: match udp dst 9999 ffff skip_sw action {action}"),
    ]
}

#[test]
#[ignore = "a longer test: unit tests have each rule"]
fn an_x550_carries_out_rules_of_tc() {
    let mut nic = X550::boot(Kernel::Generic, 2);
    let vfs = nic.enable(2);
    let interface = nic.interface();
    let received = |nic: &mut X550, of: &str| -> u64 {
        let count = nic.guest.ok(&format!("cat /sys/class/net/{of}/statistics/rx_packets"));
        count.trim().parse().expect("a counter is a number")
    };
    for module in ["cls_u32", "sch_ingress", "act_mirred", "act_gact"] {
        nic.guest.load(module);
    }
    // Only the PF answers for its address, though a VF gets requests for it too.
    nic.guest.ok("echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore");
    let vf = vfs[1].interface().to_owned();
    nic.guest.ok(&format!("ip link set {vf} up"));
    nic.guest.await_carrier(&vf, true);
    nic.restart_of(1, &format!("{ETHTOOL} -K {interface} hw-tc-offload on"));
    for (action, reaches_vf) in [("drop".to_owned(), false), (format!("mirred egress redirect dev {vf}"), true)] {
        nic.guest.await_carrier(interface, true);
        nic.guest.await_carrier(&vf, true);
        assert!(arrive(&mut nic, 9999) >= DATAGRAMS);
        nic.guest.ok(&format!("{TC} qdisc add dev {interface} ingress"));
        filters(interface, &action).iter().for_each(|filter| drop(nic.guest.ok(filter)));
        let shown = nic.guest.ok(&format!("{TC} -s filter show dev {interface} ingress"));
        assert!(shown.split_whitespace().any(|word| word == "in_hw"), "{shown}");
        let before = received(&mut nic, &vf);
        assert!(arrive(&mut nic, 9999) < DATAGRAMS, "{action}");
        assert_eq!(received(&mut nic, &vf) >= before + DATAGRAMS, reaches_vf, "{action}");
        assert!(arrive(&mut nic, 9998) >= DATAGRAMS, "{action}: others arrive");
        nic.guest.ok(&format!("{TC} qdisc del dev {interface} ingress"));
    }
    assert!(arrive(&mut nic, 9999) >= DATAGRAMS);
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}
