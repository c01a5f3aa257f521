//! VFs over third-party backends: this project's fixtures may share a mistake with the VMM.

use std::os::unix::fs::chown;
use std::path::Path;
use std::time::{Duration, Instant};

use integration::{Api, DeviceMode, Guest, GuestSpec, HostTap, Kernel, Passt, Pf, Subnet, Testpmd, VmmCommand, vf_mac};
use rstest::rstest;
use serde_json::{Value, json};

/// A user without privileges.
const NOBODY: u32 = 65534;
/// Number of checked bytes that pass each way.
const LEN: usize = 1 << 20;
const VFS: usize = 2;

/// The passt of VF `index`. The PF's has the index after the last VF's.
fn passt(folder: &Path, index: usize) -> Passt {
    Passt::start(folder, Subnet(index as u8), Some(NOBODY))
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn an_ordinary_user_runs_a_guest_with_a_passt_per_function(#[case] kernel: Kernel) {
    let _kvm = DeviceMode::set("/dev/kvm", 0o666);
    let folder = tempfile::tempdir().unwrap();
    chown(folder.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let pf_passt = passt(folder.path(), VFS);
    let mut passts: Vec<Passt> = (0..VFS).map(|index| passt(folder.path(), index)).collect();
    let net = format!("id=pf0,mac=52:54:00:00:00:01,sriov_vfs={VFS},{}", pf_passt.net());
    let spec = GuestSpec::new(kernel).user(NOBODY).net(&net);
    let vf = |(index, passt): (usize, &Passt)| format!("pf=pf0,index={index},mac={},{}", vf_mac(index), passt.net());
    let mut guest = Guest::boot(passts.iter().enumerate().map(vf).fold(spec, |spec, vf| spec.net_vf(&vf)));

    let pf = Pf::find(&mut guest);
    pf_passt.join_and_transfer(&mut guest, "eth0", LEN);
    for enabled in ["at first", "again"] {
        pf.set_num_vfs(&mut guest, VFS);
        for vf in pf.vfs(&mut guest) {
            assert_eq!(vf.mac, vf_mac(vf.index), "VFs enabled {enabled}");
            passts[vf.index].join_and_transfer(&mut guest, vf.interface(), LEN);
        }
        pf.set_num_vfs(&mut guest, 0);
    }

    pf.set_num_vfs(&mut guest, VFS);
    let vfs = pf.vfs(&mut guest);
    for (vf, passt) in vfs.iter().zip(&passts) {
        passt.join_and_transfer(&mut guest, vf.interface(), LEN);
    }
    drop(passts.remove(0));
    guest.await_carrier(vfs[0].interface(), false);
    passts[0].transfer(&mut guest, LEN);
    passts.insert(0, passt(folder.path(), 0));
    guest.await_carrier(vfs[0].interface(), true);
    for passt in &passts {
        passt.transfer(&mut guest, LEN);
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[test]
fn vfs_over_dpdk_carry_traffic_whichever_side_listens() {
    let folder = tempfile::tempdir().unwrap();
    let socket = |index: usize| folder.path().join(format!("vf{index}.sock")).display().to_string();
    let ports = [
        format!("net_vhost0,iface={}", socket(0)),
        "net_tap0,iface=dpdk0".to_owned(),
        format!("net_vhost1,iface={},client=1", socket(1)),
        "net_tap1,iface=dpdk1".to_owned(),
    ];
    let _testpmd = Testpmd::start(&ports, "dpdk1", folder.path().join("testpmd.log"));
    let vf = |index: usize, mode: &str| {
        let (mac, socket) = (vf_mac(index), socket(index));
        format!("pf=pf0,index={index},mac={mac},vhost_user=on,socket={socket},vhost_mode={mode}")
    };
    let spec = GuestSpec::new(Kernel::V6_12).net("id=pf0,tap=pf0,mac=52:54:00:00:00:01,sriov_vfs=2");
    let mut guest = Guest::boot(spec.net_vf(&vf(0, "client")).net_vf(&vf(1, "server")));
    let pf = Pf::find(&mut guest);
    let taps = [HostTap::existing("dpdk0"), HostTap::existing("dpdk1")];
    for _ in 0..2 {
        pf.set_num_vfs(&mut guest, VFS);
        let vfs = pf.vfs(&mut guest);
        for vf in &vfs {
            guest.join(vf.interface(), Subnet(vf.index as u8));
            // On one busy processor testpmd may answer too late. The backend is then lost for a moment.
            guest.await_carrier(vf.interface(), true);
        }
        for vf in &vfs {
            vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
        }
        for vf in &vfs {
            guest.transfer(Subnet(vf.index as u8), LEN);
        }
        pf.set_num_vfs(&mut guest, 0);
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// DPDK requests translations of the addresses of a VF behind the virtual IOMMU. By default Linux maps each buffer, and
/// unmaps it later (lazy DMA).
#[test]
fn a_vf_behind_the_iommu_works_over_dpdk_without_a_fault() {
    let (api, folder) = (Api::new("dpdk-iommu"), tempfile::tempdir().unwrap());
    let socket = folder.path().join("vf0.sock").display().to_string();
    let ports = [format!("net_vhost0,iface={socket},iommu-support=1"), "net_tap0,iface=dpdk0".to_owned()];
    let _testpmd = Testpmd::start(&ports, "dpdk0", folder.path().join("testpmd.log"));
    let vf = format!("pf=pf0,index=0,mac={},vhost_user=on,socket={socket}", vf_mac(0));
    let spec = GuestSpec::new(Kernel::V6_12).net("id=pf0,tap=pf0,mac=52:54:00:00:00:01,sriov_vfs=1").net_vf(&vf);
    let arguments = ["--platform", "iommu=on", "--api-socket", &api.argument()];
    let mut guest = Guest::boot(spec.with_modules().arguments(&arguments));
    guest.load("virtio_iommu");
    let pf = Pf::find(&mut guest);
    let taps = [HostTap::existing("dpdk0")];
    for _ in 0..2 {
        pf.set_num_vfs(&mut guest, 1);
        let vf = pf.vfs(&mut guest).remove(0);
        guest.join(vf.interface(), Subnet(0));
        guest.await_carrier(vf.interface(), true);
        vf.ping_through(&mut guest, &taps, 0, Subnet(0));
        guest.transfer(Subnet(0), LEN);
        pf.set_num_vfs(&mut guest, 0);
    }
    let counters = api.get("vm.counters").body["__iommu"].clone();
    let count = |name: &str| counters[name].as_u64().unwrap();
    assert_eq!((count("attaches"), count("faults"), count("refused")), (2, 0, 0), "{counters}");
    assert!(count("maps") > 100, "{counters}");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// passt passes the guest's connections to the passt of the VMM to which the guest moves, and ends.
#[test]
fn a_passt_connection_survives_a_migration_to_another_vmm() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [mut here, mut there] = folders.each_ref().map(|folder| {
        chown(folder.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        let mut passt = passt(folder.path(), 0);
        passt.start_repair();
        passt
    });
    let [source, target] = ["passt-source", "passt-target"].map(Api::new);
    let vf = format!("pf=pf0,index=0,mac={},{}", vf_mac(0), here.net());
    let spec = GuestSpec::new(Kernel::V6_12).net("id=pf0,switch=veb,mac=52:54:00:00:00:01,sriov_vfs=1").net_vf(&vf);
    let mut guest = Guest::boot(spec.arguments(&["--no-shutdown", "--api-socket", &source.argument()]));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 1);
    let vfs = pf.vfs(&mut guest);
    here.join_and_transfer(&mut guest, vfs[0].interface(), LEN);
    let mut stream = here.open_stream(&mut guest);
    stream.assert_alive(b"before\n");

    let waiting = VmmCommand::new().args(["--no-shutdown", "--api-socket", &target.argument()]);
    let mut moved = Guest::restored_by(waiting);
    let url = format!("unix:{}", folders[1].path().join("migration").display());
    let backend = json!({"id": "pf0", "vf": 0, "vhost_socket": there.socket()});
    let receive = json!({"receiver_url": url, "detach": true, "backends": [backend]});
    assert_eq!(target.put_json("vm.receive-migration", &receive).status, 204);
    assert_eq!(source.put_json("vm.send-migration", &json!({"destination_url": url})).status, 204);
    let ended = [&source, &target].map(await_end);
    assert!(ended.iter().all(|ended| ended["state"] == "finished"), "{ended:?}");
    stream.assert_alive(b"after\n");
    // passt ends when its connection is closed, which the VMM does while it exits.
    let asked = Instant::now();
    while !here.has_ended() {
        assert!(asked.elapsed() < Duration::from_secs(60), "the first passt does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!there.has_ended());
    there.transfer(&mut moved, LEN);
    stream.assert_alive(b"still\n");
    moved.assert_kernel_has_no_complaint();
}

/// Waits until a migration has ended, and returns its result.
fn await_end(api: &Api) -> Value {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let progress = api.get("vm.migration-progress").body;
        if progress["state"] != "active" {
            return progress;
        }
        assert!(Instant::now() < deadline, "the migration does not end: {progress}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
