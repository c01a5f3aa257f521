mod guest_control;

use std::time::{Duration, Instant};

use super::*;
use crate::api::{NewDevice, SetVf};
use crate::config::plan::tests::PLANS;
use crate::config::{DeviceKind, DiskConfig, FsConfig, MacAddress, MissingBackend, VfRange};
use crate::control::addition::Addition;

fn instance(config: &str) -> Instance {
    Instance::new(
        PlannedVm::new(serde_json::from_str(config).unwrap()).unwrap(),
        Events::default(),
        HostLimits::default(),
    )
}

fn net(text: &str) -> NewDevice {
    NewDevice::Net(Box::new(text.parse().unwrap()), Vec::new())
}

fn file_system() -> FsConfig {
    "tag=t,socket=/nonexistent/fs".parse().unwrap()
}

fn ids(instance: &Instance) -> Vec<&str> {
    instance.config().net.iter().filter_map(|net| net.id.as_deref()).collect()
}

#[test]
fn defaults_are_decided_once() {
    let mut instance = instance(r#"{"net":[{"sriov_vfs":2},{"id":"b"}]}"#);
    let before = instance.config().clone();
    assert!(before.net.iter().all(|net| net.mac.is_some()));
    assert_eq!(instance.add(net("id=c")).unwrap(), None);
    assert_eq!(instance.config().net[..2], before.net);
    assert_eq!(ids(&instance), ["_net0", "b", "c"]);
    instance.remove_device("_net0").unwrap();
    assert_eq!(instance.config().net[0], before.net[1]);
}

#[test]
fn a_change_of_an_x550_is_left_to_its_guest() {
    let mut instance = instance(r#"{"net":[{"id":"x","model":"x550","tap":"up0","sriov_vfs":2},{"id":"v"}]}"#);
    let before = instance.config().clone();
    let what = "the guest owns the functions of an X550 and sets their policies (ip link set <PF> vf); restrict the \
                NIC's uplink on the host (docs/guide/x550.md)";
    for (change, subject) in [
        (r#"{"pf":"x","index":1,"vlan":5}"#, "pf=x,index=1"),
        (r#"{"pf":"x","index":"*","link":"down"}"#, "pf=x,index=*"),
        (r#"{"pf":"x","index":0,"tap":"t"}"#, "pf=x,index=0"),
        (r#"{"pf":"x","tap":"t"}"#, "pf=x"),
    ] {
        let refused = instance.set_vf(&serde_json::from_str::<SetVf>(change).unwrap(), Vec::new()).unwrap_err();
        assert_eq!((refused.kind, refused.chain), (ErrorKind::Conflict, vec![format!("{subject}: {what}")]));
    }
    let other = instance.set_vf(&serde_json::from_str(r#"{"pf":"v","index":0,"vlan":5}"#).unwrap(), Vec::new());
    assert!(!other.unwrap_err().chain.concat().contains("X550"));
    assert_eq!(instance.config(), &before);
}

#[test]
fn the_policy_of_an_x550s_pf_is_the_hosts_at_the_uplink() {
    let net = r#"{"id":"x","model":"x550","tap":"up0","sriov_vfs":2,"vlan":7,"vlan_qos":3,"storm":9,"link":"up"}"#;
    let policy = instance(&format!(r#"{{"net":[{net}]}}"#)).policy("x", None);
    assert_eq!((policy.vlan, policy.vlan_qos, policy.storm, policy.link), (7, 3, 9, LinkPolicy::Up));
}

#[test]
fn an_x550_is_added_as_planned_and_removed() {
    let mut instance = instance(r#"{"net":[{"id":"a","tap":"a"}]}"#);
    assert_eq!(instance.add(net("id=x,model=x550,tap=up0,sriov_vfs=63")).unwrap(), None);
    assert!(instance.config().net[1].mac.is_some() && instance.planned.plan().devices.iter().any(|d| d.id == "x"));
    let refused = instance.add(net("id=xv62")).unwrap_err().to_string();
    assert!(refused.contains("VF 62 of x"), "{refused}");
    assert!(instance.add(net("id=y,model=x550,tap=up0")).unwrap_err().to_string().contains("already in use by x"));
    instance.remove_device("x").unwrap();
    assert_eq!(ids(&instance), ["a"]);
}

#[test]
fn pf_without_tap_gets_an_unused_name_after_another_is_removed() {
    let mut instance = instance(r#"{"net":[{"id":"a","sriov_vfs":1},{"id":"b","sriov_vfs":1}]}"#);
    instance.remove_device("a").unwrap();
    instance.add(net("id=c,sriov_vfs=1")).unwrap();
    let taps: Vec<_> = instance.config().net.iter().map(|net| net.backend.tap.clone().unwrap()).collect();
    assert_ne!(taps[0], taps[1]);
}

#[test]
fn a_device_that_cannot_be_leaves_no_trace() {
    let mut instance = instance(r#"{"net":[{"id":"a","tap":"a0"}]}"#);
    let before = instance.config().clone();
    for wrong in ["id=a", "tap=a0", "mtu=1", "pci_device_id=32", "id=__x", "num_queues=1", "sriov_vfs=65535"] {
        assert!(instance.add(net(wrong)).is_err(), "{wrong}");
    }
    assert!(
        instance.add(NewDevice::Other(Box::new("id=a,path=/x".parse::<DiskConfig>().unwrap()))).is_err(),
        "a name is one of all devices"
    );
    assert_eq!(instance.config(), &before);
}

#[test]
fn device_keeps_its_passed_descriptor_until_removal() {
    use std::io::Read as _;

    let (mut end, sent) = std::io::pipe().unwrap();
    let number = sent.as_raw_fd();
    let device =
        |sent| NewDevice::Host(Box::new(format!("id=d,fd={number}").parse().unwrap()), vec![OwnedFd::from(sent)]);
    let mut without = instance("{}");
    let error = without.add(device(sent.try_clone().unwrap())).unwrap_err().to_string();
    assert!(error.contains("add --platform iommufd_fd="), "{error}");
    let mut instance = instance(r#"{"platform":{"iommufd_fd":1000}}"#);
    assert_eq!(instance.add(device(sent)).unwrap(), None);
    assert_eq!(instance.config().devices[0].fd, Some(number));
    instance.remove_device("d").unwrap();
    assert_eq!(end.read(&mut [0]).unwrap(), 0, "the other end is closed");
}

#[test]
fn a_device_that_is_missing_or_in_every_vm_is_not_removed() {
    let mut instance = instance("{}");
    let kind = |instance: &mut Instance, id| instance.remove_device(id).unwrap_err().kind;
    assert_eq!(kind(&mut instance, "unknown"), ErrorKind::NotFound);
    assert_eq!(kind(&mut instance, "__rng"), ErrorKind::Invalid);
}

#[test]
fn taps_that_were_passed_are_kept_as_long_as_their_nic() {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut instance = instance("{}");
    // The numbers in the request are not used.
    instance.add(NewDevice::Net(Box::new("id=a,fd=[3]".parse().unwrap()), vec![ours.into()])).unwrap();
    theirs.set_nonblocking(true).unwrap();
    let gone = || std::io::Read::read(&mut &theirs, &mut [0]).is_ok_and(|len| len == 0);
    assert!(!gone());
    instance.remove_device("a").unwrap();
    // A child of another test may hold a copy for a moment.
    let until = Instant::now() + Duration::from_secs(60);
    while !gone() {
        assert!(Instant::now() < until, "the descriptor is not closed");
        std::thread::yield_now();
    }
}

#[test]
fn mac_set_on_a_vf_becomes_its_own_in_the_config() {
    let instance = instance(
        r#"{"net":[{"id":"a","mac":"52:54:00:00:00:01","sriov_vfs":3,"vfs":[{"index":2,"mac":"52:54:00:00:01:02"}]},
            {"id":"b","mac":"52:54:00:00:00:02"}]}"#,
    );
    let given = |index, mac: &str| {
        let mac = Some(mac.parse().unwrap());
        let change = SetVf { pf: "a".to_string(), index: Some(VfRange::One(index)), mac, ..SetVf::default() };
        instance.planned_with_vf(&change).map(Option::unwrap)
    };
    for index in 0..3 {
        let (mut expected, changed) = (instance.planned.plan().clone(), given(index, "52:54:00:77:77:77").unwrap());
        let pf = expected.devices.iter_mut().find(|device| device.id == "a").unwrap();
        let DeviceKind::Net(net) = &mut pf.kind else { panic!("a is a PF") };
        let spec = &mut net.vfs[usize::from(index)].spec;
        spec.mac = [0x52, 0x54, 0, 0x77, 0x77, 0x77];
        spec.policy.address = Some(spec.mac);
        assert_eq!(changed.plan(), &expected);
    }
    given(2, "52:54:00:00:01:02").unwrap();
    let derived = instance.planned.plan().nets().next().unwrap().vfs[1].spec.mac;
    given(0, "52:54:00:00:00:02").expect("another device may have it");
    for used in ["52:54:00:00:00:01", "52:54:00:00:01:02", &MacAddress(derived).to_string()] {
        let failure = given(0, used).unwrap_err();
        assert_eq!(failure.kind, ErrorKind::Conflict, "{failure:?}");
    }
    assert_eq!(given(0, "01:00:00:00:00:01").unwrap_err().kind, ErrorKind::Invalid);
}

/// A VM that is not started, whose PF waits for a backend.
fn opened(json: &str) -> Instance {
    let folder = tempfile::tempdir().unwrap();
    let kernel = folder.path().join("kernel");
    std::fs::write(&kernel, crate::vm::elf(&[0xf4])).unwrap();
    let mut config: VmConfig = serde_json::from_str(json).unwrap();
    config.payload.kernel = Some(kernel);
    let mut planned = PlannedVm::new(config).unwrap();
    planned.nic_mut("pf", None).unwrap().missing = MissingBackend::LinkDown;
    let limits = HostLimits::default();
    let vm = Vm::new(planned.config(), planned.plan(), Events::default(), limits, None).unwrap();
    let mut instance = Instance::new(planned, Events::default(), limits);
    instance.vm = Some(vm);
    instance
}

#[test]
fn memory_is_pinned_from_the_opening_of_a_pinning_device() {
    let mut instance = opened(
        r#"{"serial":{"mode":"Null"},"console":{"mode":"Null"},"memory":{"size":16777216,"shared":true},
            "net":[{"id":"pf","vhost_user":true,"vhost_socket":"/nonexistent/socket"}]}"#,
    );
    let given = |text: &str| SetVf { pf: "pf".into(), ..serde_json::from_str(text).unwrap() };
    let set = |text| Action::SetVf(Box::new(given(text)), Vec::new());
    for (pins, action) in [
        (true, Action::Add(NewDevice::Host(Box::new("path=/sys/bus/pci/devices/none".parse().unwrap()), Vec::new()))),
        (true, set(r#"{"pf":"pf","vdpa":"/dev/vhost-vdpa-none"}"#)),
        (false, set(r#"{"pf":"pf","vhost_socket":"/nonexistent/other"}"#)),
        (false, Action::Add(NewDevice::Other(Box::new(file_system())))),
    ] {
        let acquire = instance.acquirer(&action).unwrap();
        assert_eq!(instance.vm().unwrap().pins_memory(), pins);
        // Opening fails here. Where it succeeds, the device would be plugged in.
        assert!(instance.keep(acquire(&Cancel::new().unwrap())));
        assert_eq!(instance.vm().unwrap().pins_memory(), pins, "until what was opened is closed");
        instance.forget_acquired();
        instance.end_pinning();
        assert!(!instance.vm().unwrap().pins_memory());
    }
}

/// A VM as by [`opened`] that has shared memory, and the number of plans made by this thread until now.
fn opened_and_planned() -> (Instance, u32) {
    let instance = opened(
        r#"{"serial":{"mode":"Null"},"console":{"mode":"Null"},"memory":{"size":16777216,"shared":true},
            "net":[{"id":"pf","vhost_user":true,"vhost_socket":"/nonexistent/socket"}]}"#,
    );
    (instance, PLANS.get())
}

fn addition(instance: &Instance) -> &Addition {
    match &instance.acquired {
        Some(OpenedResources::Device(addition)) => addition,
        _ => panic!("no device was planned"),
    }
}

fn added(action: Action) -> NewDevice {
    match action {
        Action::Add(device) => device,
        action => panic!("{action:?}"),
    }
}

#[test]
fn an_added_device_is_planned_once_and_keeps_its_macs() {
    let (mut instance, before) = opened_and_planned();
    let action = Action::Add(net("id=n,switch=veb,sriov_vfs=2"));
    assert!(instance.acquirer(&action).is_none(), "nothing of it takes time");
    let macs = |plan: &DevicePlan| plan.nics().map(|nic| nic.spec.mac).collect::<Vec<_>>();
    let planned = macs(addition(&instance).device().unwrap());
    let answer = instance.add(added(action)).unwrap().unwrap();
    assert_eq!((&*answer.id, PLANS.get() - before), ("n", 1));
    let opened = macs(instance.vm().unwrap().devices().find("n").unwrap().plan());
    assert_eq!((opened, planned.len()), (planned.clone(), 3));
    assert_eq!(instance.config().net[1].mac, Some(MacAddress(planned[0]).into()));
}

#[test]
fn a_device_is_planned_once_if_its_backend_is_opened_before() {
    let (mut instance, before) = opened_and_planned();
    for (plans, action) in [
        (1, Action::Add(NewDevice::Other(Box::new(file_system())))),
        (2, Action::Add(NewDevice::Host(Box::new("path=/sys/bus/pci/devices/none".parse().unwrap()), Vec::new()))),
    ] {
        let acquire = instance.acquirer(&action).unwrap();
        assert!(instance.keep(acquire(&Cancel::new().unwrap())));
        let line = instance.add(added(action)).unwrap_err().to_string();
        assert!(line.contains("none"), "{line}");
        instance.end_pinning();
        assert_eq!(PLANS.get() - before, plans);
    }
    // A device that the VM cannot have is found out by its only plan.
    let action = Action::Add(net("id=pf"));
    assert!(instance.acquirer(&action).is_none());
    instance.add(added(action)).unwrap_err();
    assert_eq!(PLANS.get() - before, 3);
}

#[test]
fn a_new_backend_is_planned_once_unless_the_vm_changes() {
    let (mut instance, before) = opened_and_planned();
    let change = || serde_json::from_str::<SetVf>(r#"{"pf":"pf","vhost_socket":"/nonexistent/other"}"#).unwrap();
    for (is_changed, plans) in [(false, 1), (true, 3)] {
        let acquire = instance.acquirer(&Action::SetVf(Box::new(change()), Vec::new())).unwrap();
        assert!(instance.keep(acquire(&Cancel::new().unwrap())));
        if is_changed {
            // As when the guest releases a device while the backend is opened.
            instance.planned_mut();
        }
        let failure = instance.set_vf(&change(), Vec::new()).unwrap_err();
        assert!(format!("{failure:?}").contains("/nonexistent/other"), "{failure:?}");
        assert_eq!(PLANS.get() - before, plans);
    }
}

#[test]
fn a_plan_is_made_anew_if_the_vm_has_changed_since() {
    let (mut instance, before) = opened_and_planned();
    let action = Action::Add(net("id=n,switch=veb,sriov_vfs=1"));
    assert!(instance.acquirer(&action).is_none());
    // As when the guest releases a device while a backend is opened.
    instance.forget_device("pf");
    let new = net("id=n,switch=veb,sriov_vfs=1");
    assert!(!addition(&instance).is_of(&new, &instance.planned, true));
    instance.add(added(action)).unwrap();
    assert_eq!((ids(&instance), PLANS.get() - before), (vec!["n"], 2));
}

#[test]
fn a_plan_for_one_device_is_not_used_for_another() {
    let (mut instance, before) = opened_and_planned();
    assert!(instance.acquirer(&Action::Add(net("id=n,switch=veb,sriov_vfs=1"))).is_none());
    instance.add(net("id=m,switch=veb,sriov_vfs=1")).unwrap();
    assert_eq!((ids(&instance), PLANS.get() - before), (vec!["pf", "m"], 2));
}

#[test]
fn a_plan_for_a_booted_vm_is_not_used_once_it_is_off() {
    let (mut instance, before) = opened_and_planned();
    let action = Action::Add(net("id=n,switch=veb,sriov_vfs=1"));
    assert!(instance.acquirer(&action).is_none());
    // As when the guest powers off while a backend is opened.
    instance.vm = None;
    assert_eq!(instance.add(added(action)).unwrap(), None);
    assert_eq!((ids(&instance), PLANS.get() - before), (vec!["pf", "n"], 2));
}
