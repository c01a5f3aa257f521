//! Events in `--event-monitor` of a guest: its use of its NIC, and its panic.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use integration::{Api, Guest, GuestSpec, Kernel, Pf, VmmCommand, predicted_vf_address, spec_with_vfs};
use rstest::rstest;
use serde_json::{Value, json};

/// Time within which an event must be reported.
const EVENT_LIMIT: Duration = Duration::from_secs(60);

/// The path of the event file, which is removed when this is dropped.
struct Events(PathBuf);

impl Drop for Events {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// The events so far: source, name and, except for the entropy device, properties. The last one may be incomplete.
fn told(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    let events = serde_json::Deserializer::from_str(&text).into_iter::<Value>().map_while(Result::ok);
    let line = |event: Value| {
        let word = |name: &str| event[name].as_str().unwrap().to_string();
        let properties = event["properties"].as_object().cloned().unwrap_or_default();
        let properties = properties.iter().map(|(name, value)| format!(" {name}={}", value.as_str().unwrap()));
        format!("{}:{}{}", word("source"), word("event"), properties.collect::<String>())
    };
    events.map(line).filter(|line| !line.contains("__rng")).collect()
}

fn wait_for(path: &Path, event: &str) {
    let deadline = Instant::now() + EVENT_LIMIT;
    while told(path).last().is_none_or(|last| last != event) {
        assert!(Instant::now() < deadline, "{event} is not the last event: {:?}", told(path));
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_guests_use_of_its_vfs_is_reported(#[case] kernel: Kernel) {
    let events = Events(std::env::temp_dir().join(format!("events-{}-{kernel:?}", std::process::id())));
    let argument = format!("path={}", events.0.display());
    let mut guest = Guest::boot(spec_with_vfs(kernel, 2).arguments(&["--event-monitor", &argument]));
    wait_for(&events.0, "virtio-device:activated id=pf0");
    let pf = Pf::at("0000:00:01.0");
    pf.set_num_vfs(&mut guest, 2);
    wait_for(&events.0, "sriov:vf-driver-ok id=pf0 index=1");
    guest.unbind(&predicted_vf_address(1));
    wait_for(&events.0, "sriov:vf-reset by=driver id=pf0 index=1");
    guest.bind(&predicted_vf_address(1));
    wait_for(&events.0, "sriov:vf-driver-ok id=pf0 index=1");
    pf.set_num_vfs(&mut guest, 0);
    wait_for(&events.0, "sriov:vfs-disabled by=driver id=pf0 num_vfs=2");
    assert_eq!(guest.power_off().code, Some(0));
    let told = told(&events.0);
    let of_vfs: Vec<_> = told.iter().filter(|event| event.starts_with("sriov:")).map(String::as_str).collect();
    // While it disables VFs, Linux unbinds their drivers one by one.
    let resets = of_vfs.iter().filter(|event| event.contains("vf-reset")).count();
    assert!((1..=3).contains(&resets), "{of_vfs:?}");
    let others: Vec<_> = of_vfs.into_iter().filter(|event| !event.contains("vf-reset")).collect();
    assert_eq!(
        others,
        [
            "sriov:vfs-enabled id=pf0 num_vfs=2",
            "sriov:vf-driver-ok id=pf0 index=0",
            "sriov:vf-driver-ok id=pf0 index=1",
            "sriov:vf-driver-ok id=pf0 index=1",
            "sriov:vfs-disabled by=driver id=pf0 num_vfs=2",
        ]
    );
    assert_eq!((told[0].as_str(), told[1].as_str(), told[2].as_str()), ("vmm:starting", "vm:booting", "vm:booted"));
    // An earlier reset is the driver's, which Linux does at a power-off.
    assert!(told.ends_with(&["vm:shutdown", "vm:deleted", "vmm:shutdown"].map(String::from)), "{told:?}");
}

#[test]
fn a_restore_has_the_events_of_cloud_hypervisor_in_their_order() {
    let (api, saved) = (Api::new("events"), tempfile::tempdir().unwrap());
    let net = GuestSpec::new(Kernel::V6_12).net("id=n,tap=ev0");
    let guest = Guest::boot(net.arguments(&["--api-socket", &api.argument()]));
    assert_eq!(api.put("vm.pause").status, 204);
    let url = format!("file://{}", saved.path().display());
    assert_eq!(api.put_json("vm.snapshot", &json!({ "destination_url": url })).status, 204);
    assert_eq!(guest.stop_by(libc::SIGKILL).code, None);
    let events = saved.path().join("events");
    let (monitor, source) = (format!("path={}", events.display()), format!("source_url={url},resume=on"));
    let mut guest = Guest::restored_by(VmmCommand::new().args(["--event-monitor", &monitor, "--restore", &source]));
    assert_eq!(guest.ok("echo $((6 * 7))"), "42");
    assert_eq!(guest.stop_by(libc::SIGTERM).code, Some(0));
    let expected = [
        "vmm:starting",
        "virtio-device:activated id=n",
        "vm:restoring",
        "vm:restored",
        "vm:resuming",
        "vm:resumed",
        "vm:shutdown",
        "vm:deleted",
        "vmm:shutdown",
    ];
    assert_eq!(told(&events), expected);
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_guest_that_panics_reports_it_by_its_pvpanic_device(#[case] kernel: Kernel) {
    let events = Events(std::env::temp_dir().join(format!("panic-{}-{kernel:?}", std::process::id())));
    let argument = format!("path={}", events.0.display());
    let arguments = ["--pvpanic", "--event-monitor", &argument];
    let mut guest = Guest::boot(GuestSpec::new(kernel).with_modules().kernel_argument("panic=0").arguments(&arguments));
    guest.load("pvpanic-pci");
    // The entropy device is in the first slot.
    let device = "/sys/bus/pci/devices/0000:00:02.0";
    assert_eq!(guest.ok(&format!("cat {device}/vendor {device}/device {device}/capability")), "0x1b36\n0x0011\n3");
    guest.assert_kernel_has_no_complaint();
    guest.crash();
    wait_for(&events.0, "guest:panic event=panic");
    assert_eq!(guest.stop_by(libc::SIGTERM).code, Some(0));
}
