//! A host device in a guest that Cloud Hypervisor's own firmware boots.

use integration::{Guest, GuestSpec, HostNic, Pf, firmware_disk, hypervisor_fw};

/// The firmware ignores the NIC, which is the host's own virtio device. Linux uses it in addition to VFs.
#[test]
fn hypervisor_fw_boots_linux_beside_a_device_of_the_host() {
    let Some(firmware) = hypervisor_fw() else { return };
    let nics = HostNic::virtio();
    let spec = GuestSpec::by_hypervisor_fw("--firmware", &firmware)
        .disk(&format!("path={},readonly=on", firmware_disk().display()))
        .arguments(&["--device", &nics[0].option(",id=nic")])
        .net("id=pf0,tap=pf0,sriov_vfs=2");
    let mut guest = Guest::start_by_firmware(spec.command());
    guest.wait_for_linux();
    let pf = Pf::find(&mut guest);
    let own = guest.ok(&format!("ls {}", pf.file("virtio*/net"))).trim().to_owned();
    let passed = guest.ok(&format!("ls /sys/class/net | grep -vxE 'lo|{own}'"));
    nics[0].join(&mut guest, passed.trim());
    pf.set_num_vfs(&mut guest, 2);
    assert_eq!(pf.vfs(&mut guest).len(), 2);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
