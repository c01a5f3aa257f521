//! Host devices in a guest: virtio NICs of the first-level machine, behind its IOMMU.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use integration::{Api, Guest, GuestSpec, HostNic, Kernel};
use serde_json::{Value, json};

/// Time that the host may wait for a device that it requests back.
const GIVEN_BACK: Duration = Duration::from_secs(30);
/// Time within which an event must be reported.
const EVENT_LIMIT: Duration = Duration::from_secs(60);
/// A user without privileges.
const NOBODY: u32 = 65534;

/// The path of the event file, which is removed when this is dropped.
struct Events(PathBuf);

impl Events {
    /// True if `event` was reported for the device `id`.
    fn told(&self, event: &str, id: &str) -> bool {
        let text = fs::read_to_string(&self.0).unwrap();
        let events = serde_json::Deserializer::from_str(&text).into_iter::<Value>().map_while(Result::ok);
        let is_it = |told: &Value| told["source"] == "vfio" && told["event"] == event && told["properties"]["id"] == id;
        events.into_iter().any(|told| is_it(&told))
    }

    fn await_told(&self, event: &str, id: &str) {
        let deadline = Instant::now() + EVENT_LIMIT;
        while !self.told(event, id) {
            assert!(Instant::now() < deadline, "vfio:{event} does not name {id}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// A guest with this device, which reports to `events`.
fn guest(nic: &str, api: &Api, events: &Events) -> Guest {
    let events = format!("path={}", events.0.display());
    let arguments = ["--api-socket", &api.argument(), "--event-monitor", &events, "--device", nic];
    Guest::boot(GuestSpec::new(Kernel::V6_12).arguments(&arguments))
}

/// The number of interrupts of virtio devices in the guest.
fn interrupts(guest: &mut Guest) -> u64 {
    let sum = "awk '/virtio.*(input|output)/ { n += $2 } END { print n + 0 }' /proc/interrupts";
    guest.ok(sum).trim().parse().unwrap()
}

#[test]
fn an_unbind_by_the_host_takes_a_used_device_from_the_guest() {
    let nics = HostNic::virtio();
    let api = Api::new("vfio-request");
    let events = Events(std::env::temp_dir().join(format!("vfio-events-{}", std::process::id())));
    let mut guest = guest(&nics[0].option(",id=nic"), &api, &events);
    let before = interrupts(&mut guest);
    nics[0].join(&mut guest, "eth0");
    assert!(interrupts(&mut guest) >= before + 6, "MSI-X");
    assert_eq!(api.put_json("vm.resize", &json!({"desired_balloon": 1})).status, 400);
    let [other, function] = HostNic::functions_of_one_group();
    for (folder, status, reason) in [
        (function.folder(), 400, format!("also has {} (virtio-pci)", other.name())),
        (Path::new("/sys/class/net/lo"), 400, "this is not the folder of a PCI device".to_string()),
        (nics[0].folder(), 409, "this device of the host is already in use".to_string()),
    ] {
        let refused = api.put_json("vm.add-device", &json!({"path": folder}));
        assert!(refused.status == status && refused.body.to_string().contains(&reason), "{refused:?}");
    }
    assert_eq!(api.put("vm.pause").status, 204);
    for (endpoint, body) in [
        ("vm.snapshot", json!({"destination_url": "file:///tmp/vfio-snapshot"})),
        ("vm.send-migration", json!({"destination_url": "unix:/tmp/vfio-migration"})),
    ] {
        let refused = api.put_json(endpoint, &body);
        let line = refused.body.to_string();
        assert!(refused.status >= 400 && line.contains("nic: ") && line.contains("remove it"), "{line}");
    }
    assert_eq!(api.put("vm.resume").status, 204);
    assert!(!events.told("device-requested", "nic"));
    let (folder, name) = (nics[0].folder().to_owned(), nics[0].name());
    // In another process: the kernel waits for the device, uninterruptibly.
    let unbind = format!("echo {name} > {}/driver/unbind", folder.display());
    let (began, mut unbind) = (Instant::now(), Command::new("sh").args(["-c", &unbind]).spawn().unwrap());
    while unbind.try_wait().unwrap().is_none() {
        assert!(began.elapsed() < Duration::from_secs(60), "the host never gets it");
        thread::sleep(Duration::from_millis(20));
    }
    println!("unbound after {} ms", began.elapsed().as_millis());
    assert!(began.elapsed() < GIVEN_BACK, "it took {} ms", began.elapsed().as_millis());
    api.await_removal("nic");
    events.await_told("device-requested", "nic");
    assert!(!guest.vmm().has_bar_mapped());
    guest.wait_for("[ ! -e /sys/class/net/eth0 ]");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[test]
fn an_unsuitable_host_device_is_refused_in_one_line() {
    let nics = HostNic::virtio();
    let refused = |spec: GuestSpec| {
        let exit = spec.command().run();
        assert_eq!(exit.code, Some(1), "{}", exit.errors);
        exit.errors
    };
    let with = |device: &str| GuestSpec::new(Kernel::V6_12).arguments(&["--device", device]);
    // Another user may open KVM, but none of the other files that this needs.
    fs::set_permissions("/dev/kvm", fs::Permissions::from_mode(0o666)).unwrap();
    let line = refused(with(&nics[0].option("")).user(NOBODY));
    assert!(line.contains("cannot open /dev/vfio/") && line.contains("make this user the owner"), "{line}");
    nics[0].give_to_user(NOBODY);
    let line = refused(with(&nics[0].option("")).user(NOBODY));
    nics[0].give_to_user(0);
    let needed = "the device needs 262144 KiB of locked memory in all, and 8192 KiB are allowed; raise the limit \
                  (ulimit -l 262144";
    assert!(line.contains(needed), "{line}");
    nics[1].bind("virtio-pci");
    let line = refused(with(&nics[1].option("")));
    assert!(line.contains("the device has the driver virtio-pci; bind it to vfio-pci"), "{line}");
    let line = refused(with("path=/sys/class/net/lo"));
    assert!(line.contains("this is not the folder of a PCI device"), "{line}");
    let [other, function] = HostNic::functions_of_one_group();
    let line = refused(with(&function.option("")));
    let group = format!("also has {} (virtio-pci); bind that to vfio-pci or to no driver", other.name());
    assert!(line.contains("its IOMMU group") && line.contains(&group), "{line}");
    let line = refused(with(&HostNic::without_interrupts().option("")));
    assert!(line.contains("it has neither MSI-X nor MSI, and no interrupt pin"), "{line}");
    nics[1].give_to_vfio();
}
