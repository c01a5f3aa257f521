//! DPDK's testpmd in a guest, on VFs behind the virtual IOMMU.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::net::UdpSocket;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use integration::{
    Api, Backend, Backends, Guest, GuestSpec, GuestTestpmd, HostTap, Kernel, Pf, Subnet, Vf, VmmCommand, spec_with_vfs,
    vf_taps,
};
use serde_json::json;

/// The first two belong to DPDK, the last one to the kernel.
const VFS: usize = 3;
/// Frames each way.
const FRAMES: u64 = 20;
/// Time that frames may take.
const PATIENCE: Duration = Duration::from_secs(60);

fn spec(api: &Api) -> GuestSpec {
    let spec = spec_with_vfs(Kernel::V6_12, VFS).with_dpdk().memory("size=512M");
    spec.arguments(&["--platform", "iommu=on", "--api-socket", &api.argument()])
}

/// Makes `tap` join its network, and passes all VFs except the last one to testpmd, which answers pings.
fn start(guest: &mut Guest) -> (Pf, Vec<Vf>, GuestTestpmd) {
    guest.load_vfio();
    let pf = Pf::find(guest);
    pf.set_num_vfs(guest, VFS);
    let vfs = pf.vfs(guest);
    let addresses: Vec<_> = vfs[..2].iter().map(|vf| vf.address.as_str()).collect();
    addresses.iter().for_each(|address| guest.give_to_vfio(address));
    let mut testpmd = GuestTestpmd::start(guest, &addresses);
    testpmd.command(guest, "set fwd icmpecho");
    testpmd.command(guest, "start");
    (pf, vfs, testpmd)
}

/// Pings testpmd through the first two taps.
fn ping_testpmd() {
    ping(&vf_taps(VFS)[..2]);
}

/// Pings the functions behind these taps, the first ones.
fn ping(taps: &[HostTap]) {
    for (index, tap) in taps.iter().enumerate() {
        let subnet = Subnet(u8::try_from(index).unwrap());
        tap.join(subnet);
        let before = tap.counters();
        let pings =
            Command::new("ping").args(["-c", "6", "-i", "0.2", "-W", "20", &subnet.guest().to_string()]).output();
        let text = String::from_utf8_lossy(&pings.unwrap().stdout).into_owned();
        assert!(text.contains(" 0% packet loss"), "{text}");
        assert!(tap.counters().from_guest >= before.from_guest + 6, "{}", tap.name());
    }
}

/// Sends `FRAMES` datagrams into one tap, which leave through the other.
fn assert_forwarded(from: usize, taps: &[HostTap]) {
    let (out, subnet) = (&taps[1 - from], Subnet(u8::try_from(from).unwrap()));
    let before = out.counters().from_guest;
    let socket = UdpSocket::bind((subnet.host(), 0)).unwrap();
    for _ in 0..FRAMES {
        socket.send_to(&[0; 500], (subnet.guest(), 9)).unwrap();
    }
    let began = Instant::now();
    while out.counters().from_guest < before + FRAMES {
        assert!(began.elapsed() < PATIENCE, "{} of {FRAMES}", out.counters().from_guest - before);
        thread::sleep(Duration::from_millis(20));
    }
}

fn assert_kernel_is_content(guest: &mut Guest) {
    guest.assert_kernel_has_no_complaint();
    let complaints = guest.run("dmesg | grep -E 'page fault from|(iommu|vfio).*([Ff]ail|[Ee]rror)'").text;
    assert_eq!(complaints, "");
}

#[test]
fn dpdk_forwards_frames_on_vfs_while_the_kernel_has_another() {
    let api = Api::new("dpdk");
    let mut guest = Guest::boot(spec(&api));
    let (pf, vfs, mut testpmd) = start(&mut guest);
    let taps = vf_taps(VFS);
    ping_testpmd();
    vfs[2].ping_through(&mut guest, &taps, 2, Subnet(2));

    testpmd.command(&mut guest, "stop");
    testpmd.command(&mut guest, "set fwd io");
    testpmd.command(&mut guest, "start");
    (0..2).for_each(|from| assert_forwarded(from, &taps));
    testpmd.command(&mut guest, "stop");
    let log = testpmd.end(&mut guest);
    for port in 0..2 {
        // 6 pings, 1 ARP request, and the forwarded frames.
        assert!(GuestTestpmd::received(&log, port) > 6 + FRAMES, "{log}");
    }
    let counters = api.get("vm.counters").body;
    assert_eq!((&counters["__iommu"]["faults"], &counters["__iommu"]["refused"]), (&json!(0), &json!(0)));

    vfs[..2].iter().for_each(|vf| guest.take_from_vfio(&vf.address));
    for vf in pf.vfs(&mut guest) {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    assert_kernel_is_content(&mut guest);
    assert_eq!(guest.power_off().code, Some(0));
}

/// Each kind of backend that moves a VF's frames reaches the memory that DPDK has mapped for the VF.
#[test]
fn dpdk_echoes_over_every_backend_while_the_kernel_has_a_vf() {
    const KINDS: [Backend; 5] = [Backend::Tap, Backend::VhostNet, Backend::VhostUser, Backend::Vdpa, Backend::Tap];
    let (api, backends) = (Api::new("dpdk-kinds"), Backends::start_with(&KINDS, &["--translate"], &[]));
    let spec = backends.spec(Kernel::V6_12).with_dpdk().memory("size=512M,shared=on");
    let mut guest = Guest::boot(spec.arguments(&["--platform", "iommu=on", "--api-socket", &api.argument()]));
    guest.load_vfio();
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, KINDS.len());
    let vfs = pf.vfs(&mut guest);
    let addresses: Vec<_> = vfs[..4].iter().map(|vf| vf.address.as_str()).collect();
    addresses.iter().for_each(|address| guest.give_to_vfio(address));
    let mut testpmd = GuestTestpmd::start(&mut guest, &addresses);
    testpmd.command(&mut guest, "set fwd icmpecho");
    testpmd.command(&mut guest, "start");
    let taps = backends.taps();
    ping(&taps[..4]);
    vfs[4].ping_through(&mut guest, &taps, 4, Subnet(4));
    testpmd.command(&mut guest, "stop");
    let log = testpmd.end(&mut guest);
    for port in 0..4 {
        // 6 pings, and 1 ARP request.
        assert!(GuestTestpmd::received(&log, port) >= 7, "{log}");
    }
    let counters = api.get("vm.counters").body;
    assert_eq!((&counters["__iommu"]["faults"], &counters["__iommu"]["refused"]), (&json!(0), &json!(0)));
    assert_kernel_is_content(&mut guest);
    assert_eq!(guest.power_off().code, Some(0));
}

/// DPDK's mappings for its VFs exist again in a restored VM, in which DPDK continues without interruption.
#[test]
#[ignore = "a longer test: a guest that is restored"]
fn dpdk_resumes_from_a_snapshot() {
    let api = Api::new("dpdk-saved");
    let mut guest = Guest::boot(spec(&api));
    let (pf, vfs, testpmd) = start(&mut guest);
    let taps = vf_taps(VFS);
    ping_testpmd();
    vfs[2].ping_through(&mut guest, &taps, 2, Subnet(2));
    let host = std::fs::read_to_string("/sys/class/net/pf0v2/address").unwrap();
    let saved = tempfile::tempdir().unwrap();
    let url = format!("file://{}", saved.path().display());
    assert_eq!(api.put("vm.pause").status, 204);
    assert_eq!(api.put_json("vm.snapshot", &json!({ "destination_url": url })).status, 204);
    assert_eq!(guest.stop_by(libc::SIGKILL).code, None);

    let api = Api::new("dpdk-restored");
    let keys = format!("source_url={url},resume=on");
    let command = VmmCommand::new().args(["--restore", &keys, "--api-socket", &api.argument()]);
    let mut guest = Guest::restored_by(command);
    assert_eq!(api.info()["state"], "Running");
    // The kernel's neighbour keeps its address, which the guest has cached.
    let kept = Command::new("ip").args(["link", "set", "pf0v2", "address", host.trim()]).status();
    assert!(kept.unwrap().success());
    ping_testpmd();
    let taps = vf_taps(VFS);
    vfs[2].ping_through(&mut guest, &taps, 2, Subnet(2));
    let counters = api.get("vm.counters").body;
    assert_eq!((&counters["__iommu"]["faults"], &counters["__iommu"]["refused"]), (&json!(0), &json!(0)));
    testpmd.end(&mut guest);
    vfs[..2].iter().for_each(|vf| guest.take_from_vfio(&vf.address));
    for vf in pf.vfs(&mut guest) {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    assert_kernel_is_content(&mut guest);
    assert_eq!(guest.power_off().code, Some(0));
}
