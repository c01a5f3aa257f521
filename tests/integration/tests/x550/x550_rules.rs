//! Rules for frames that a guest has its X550 carry out: `ethtool -N`, and `tc` with the filter u32.

#![expect(clippy::expect_used, reason = "a test fails by panicking, also in its helpers")]

use std::net::UdpSocket;

use integration::{ETHTOOL, Kernel, TC, X550};

/// Datagrams for a port: more than others that arrive in the meantime.
const DATAGRAMS: u64 = 20;

/// Sends datagrams to `port` of the PF's address. Returns how many frames the PF's driver has received.
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
#[ignore = "a longer test that does not pass yet: the PF does not answer after a rule"]
fn an_x550_carries_out_rules_of_ethtool_and_tc() {
    let mut nic = X550::boot(Kernel::Generic, 2);
    let tenants = nic.tenants(2);
    let interface = nic.interface();
    for module in ["cls_u32", "sch_ingress", "act_mirred", "act_gact"] {
        nic.guest.load(module);
    }
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

    nic.guest.ok(&format!("{ETHTOOL} -K {interface} hw-tc-offload on"));
    nic.guest.await_carrier(interface, true);
    nic.guest.ok(&format!("{TC} qdisc add dev {interface} ingress"));
    let filter = "parent ffff: protocol ip u32 ht 800: order 1 match ip dport 9999 ffff match ip protocol 17 ff";
    nic.guest.ok(&format!("{TC} filter add dev {interface} {filter} skip_sw action drop"));
    let shown = nic.guest.ok(&format!("{TC} -s filter show dev {interface} ingress"));
    assert!(shown.contains("in_hw") && !shown.contains("not_in_hw"), "{shown}");
    assert!(arrive(&mut nic, 9999) < DATAGRAMS);
    nic.guest.ok(&format!("{TC} filter del dev {interface} parent ffff:"));
    assert!(arrive(&mut nic, 9999) >= DATAGRAMS);
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}
