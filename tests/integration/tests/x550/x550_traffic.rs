//! Connections over an X550: segmentation, checksums, and VFs that come and go in the meantime.

use std::time::Duration;

use integration::{ETHTOOL, Kernel, Tenant, X550};

/// Bytes of a connection.
const BYTES: usize = 8 << 20;
/// Time that a connection may take.
const LIMIT: Duration = Duration::from_secs(150);

/// Sends [`BYTES`] bytes from one tenant to another, and compares them.
fn transfer(nic: &mut X550, from: &Tenant, to: &Tenant) {
    let port = 7100 + from.index() as u16;
    to.listen(&mut nic.guest, port, "/tmp/got");
    from.ok_within(&mut nic.guest, &format!("nc {} {port} < /tmp/blob", to.address()), LIMIT);
    nic.guest.wait_for(&format!("[ $(wc -c < /tmp/got) = {BYTES} ]"));
    nic.guest.ok("cmp /tmp/blob /tmp/got && rm /tmp/got");
}

#[test]
fn segments_between_vfs_are_cut_with_right_checksums() {
    let mut nic = X550::boot(Kernel::Generic, 3);
    let tenants = nic.tenants(3);
    nic.guest.ok(&format!("head -c {BYTES} /dev/urandom > /tmp/blob"));
    let features = nic.guest.ok(&tenants[0].command(&format!("{ETHTOOL} -k vf")));
    let is_on = |name: &str| features.lines().any(|line| line.trim().starts_with(&format!("{name}: on")));
    assert!(
        ["tcp-segmentation-offload", "tx-checksumming", "rx-checksumming"].iter().all(|it| is_on(it)),
        "{features}"
    );
    let sent = |nic: &mut X550| tenants[0].count(&mut nic.guest, "tx", "packets");
    let before = sent(&mut nic);
    transfer(&mut nic, &tenants[0], &tenants[1]);
    println!("{} frames were sent", sent(&mut nic) - before);
    // The receiver's kernel checks all sums if its VF says of none that it is right, and the sender computes all.
    nic.guest.ok(&tenants[1].command(&format!("{ETHTOOL} -K vf rx off")));
    transfer(&mut nic, &tenants[0], &tenants[1]);
    nic.guest.ok(&tenants[0].command(&format!("{ETHTOOL} -K vf tso off tx off")));
    transfer(&mut nic, &tenants[0], &tenants[1]);
    assert_eq!(tenants.iter().map(|tenant| tenant.wrong_checksums(&mut nic.guest)).sum::<u64>(), 0);

    // A VF is reset and another is unbound while others carry traffic.
    tenants[0].flood(&mut nic.guest, &tenants[1].address());
    tenants[1].flood(&mut nic.guest, &X550::UPLINK.to_string());
    for _ in 0..3 {
        nic.guest.ok("echo 1 > /sys/bus/pci/devices/0000:01:00.2/reset");
    }
    nic.guest.unbind("0000:01:00.2");
    nic.guest.bind_to("ixgbevf", "0000:01:00.2");
    let interface = nic.interface();
    nic.guest.ok(&format!("ip link set {interface} down"));
    nic.guest.join_x550();
    tenants[..2].iter().for_each(|tenant| tenant.await_carrier(&mut nic.guest, true));
    assert!(tenants[0].reaches(&mut nic.guest, &tenants[1].address()));
    nic.pf.set_num_vfs(&mut nic.guest, 0);
    assert!(nic.reaches(&X550::UPLINK.to_string()));
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}
