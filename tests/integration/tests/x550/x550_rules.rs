//! Rules for frames that a guest has its X550 carry out: `ethtool -N`, and `tc` with the filter u32.

#![expect(clippy::expect_used, reason = "a test fails by panicking, also in its helpers")]

use std::net::UdpSocket;

use integration::{ETHTOOL, Kernel, TC, X550};

/// Sends five datagrams to `port` of the PF's address. Returns how many the PF's driver has received.
fn arrive(nic: &mut X550, port: u16) -> u64 {
    let before = nic.statistic("rx_packets");
    let host = UdpSocket::bind((X550::UPLINK, 0)).expect("the uplink has an address");
    (0..5).for_each(|_| {
        host.send_to(b"rule", (X550::PF, port)).expect("the host sends");
    });
    // The PF's own ping passes behind them.
    assert!(nic.reaches(&X550::UPLINK.to_string()));
    nic.statistic("rx_packets") - before
}

#[test]
#[ignore = "a longer test: of rules, which reset the PF"]
fn an_x550_carries_out_rules_of_ethtool_and_tc() {
    let mut nic = X550::boot(Kernel::Generic, 2);
    let tenants = nic.tenants(2);
    let interface = nic.interface();
    for module in ["cls_u32", "sch_ingress", "act_mirred", "act_gact"] {
        nic.guest.load(module);
    }
    let passing = arrive(&mut nic, 9999);
    assert!(passing >= 8, "5 datagrams and 3 answers");
    nic.guest.ok(&format!("{ETHTOOL} -K {interface} ntuple on"));
    nic.guest.await_carrier(interface, true);
    nic.guest.ok(&format!("{ETHTOOL} -N {interface} flow-type udp4 dst-port 9999 action -1 loc 1"));
    assert!(arrive(&mut nic, 9999) < passing - 4, "they are dropped");
    assert!(arrive(&mut nic, 9998) >= passing - 1, "others are not");
    nic.guest.ok(&format!("{ETHTOOL} -N {interface} delete 1"));
    assert!(arrive(&mut nic, 9999) >= passing - 1);

    // To VF 1: its driver counts what the host sends to the PF.
    nic.guest.ok(&format!("{ETHTOOL} -N {interface} flow-type udp4 dst-port 9999 vf 1 queue 0 loc 2"));
    let before = tenants[1].count(&mut nic.guest, "rx", "packets");
    assert!(arrive(&mut nic, 9999) < passing - 4);
    assert!(tenants[1].count(&mut nic.guest, "rx", "packets") >= before + 5);
    nic.guest.ok(&format!("{ETHTOOL} -N {interface} delete 2"));

    nic.guest.ok(&format!("{ETHTOOL} -K {interface} hw-tc-offload on"));
    nic.guest.await_carrier(interface, true);
    nic.guest.ok(&format!("{TC} qdisc add dev {interface} ingress"));
    let filter = "parent ffff: protocol ip u32 ht 800: order 1 match ip dport 9999 ffff match ip protocol 17 ff";
    nic.guest.ok(&format!("{TC} filter add dev {interface} {filter} skip_sw action drop"));
    let shown = nic.guest.ok(&format!("{TC} -s filter show dev {interface} ingress"));
    assert!(shown.contains("in_hw") && !shown.contains("not_in_hw"), "{shown}");
    assert!(arrive(&mut nic, 9999) < passing - 4);
    nic.guest.ok(&format!("{TC} filter del dev {interface} parent ffff:"));
    assert!(arrive(&mut nic, 9999) >= passing - 1);
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}
