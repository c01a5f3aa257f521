//! Checks of a `vm.resize` request.

use crate::api::{Failure, Resize};
use crate::config::{VmConfig, balloon, bytes as text};
use crate::error_kind::ErrorKind;

/// The number of vCPUs that `resize` asks for, 1 to the maximum of `config`; `None` if it does not change the number.
///
/// # Errors
///
/// The request asks for more vCPUs than the maximum.
pub(crate) fn vcpus(resize: &Resize, config: &VmConfig) -> Result<Option<u8>, Failure> {
    let max = config.cpus.max_vcpus;
    let refuse = |line: String| Err(Failure::new(ErrorKind::Invalid, line));
    if let Some(ram) = resize.desired_ram
        && !config.memory.zones.is_empty()
    {
        return refuse(format!(
            "desired_ram={ram}: this VM's memory consists of zones, which keep their size; leave it out"
        ));
    }
    match resize.desired_vcpus {
        None => Ok(None),
        Some(0) => refuse("desired_vcpus=0: a VM needs at least one vCPU; ask for 1 or more".to_string()),
        Some(vcpus) => match u8::try_from(vcpus).ok().filter(|_| vcpus <= max) {
            Some(vcpus) => Ok(Some(vcpus)),
            None => refuse(format!(
                "desired_vcpus={vcpus}: this VM can have at most {max} vCPUs (--cpus max={max}); ask for fewer, or \
                 create it with a larger max"
            )),
        },
    }
}

/// The bytes that `resize` asks a guest with this `config` to return; `None` if it does not change that.
///
/// # Errors
///
/// The request asks for more than the guest then has, there is no balloon, or the memory would be too little for the
/// balloon.
pub(crate) fn balloon(resize: &Resize, config: &VmConfig) -> Result<Option<u64>, Failure> {
    let memory = resize.desired_ram.unwrap_or(config.memory.total());
    let Some(bytes) = resize.desired_balloon else {
        let kept = config.balloon.as_ref().map_or(0, |balloon| balloon.size);
        return match resize.desired_ram {
            Some(ram) if kept > 0 && balloon::check_size(kept, memory).is_err() => {
                let what = format!("the balloon has {}; ask for more memory, or for a smaller balloon", text(kept));
                Err(Failure::new(ErrorKind::Invalid, format!("desired_ram={ram}: {what}")))
            }
            _ => Ok(None),
        };
    };
    let refuse = |what: &str| Err(Failure::new(ErrorKind::Invalid, format!("desired_balloon={bytes}: {what}")));
    match &config.balloon {
        None if bytes == 0 => Ok(None),
        None => refuse("this VM has no balloon; create it with one (--balloon size=0)"),
        Some(_) => match balloon::check_size(bytes, memory) {
            Ok(()) => Ok(Some(bytes)),
            Err(what) => refuse(&what),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::PlannedVm;
    use crate::control::instance::Instance;
    use crate::telemetry::events::Events;

    fn instance(config: &str) -> Instance {
        Instance::new(PlannedVm::new(serde_json::from_str(config).unwrap()).unwrap(), Events::default())
    }

    #[test]
    fn a_size_that_was_not_reserved_is_refused() {
        let mut instance = instance(r#"{"cpus":{"boot_vcpus":2,"max_vcpus":4}}"#);
        let mut resize = |desired_vcpus, desired_ram, desired_balloon| {
            let answer = instance.resize(&Resize { desired_vcpus, desired_ram, desired_balloon });
            (answer.map_err(|failure| failure.kind), instance.vcpus())
        };
        assert_eq!(resize(None, None, None), (Ok(()), 2));
        assert_eq!(resize(Some(4), Some(512 << 20), Some(0)), (Ok(()), 4));
        for (vcpus, ram, balloon) in [
            (Some(5), None, None),
            (Some(257), None, None),
            (Some(0), None, None),
            (Some(1), Some(0), None),
            (Some(1), Some((1 << 20) + 1), None),
            (Some(1), Some(1 << 46), None),
            (Some(1), None, Some(1)),
        ] {
            assert_eq!(resize(vcpus, ram, balloon), (Err(ErrorKind::Invalid), 4));
        }
        assert_eq!(resize(Some(1), None, None), (Ok(()), 1));
        assert_eq!(instance.config().memory.size, 512 << 20);
    }

    #[test]
    fn zones_keep_their_size() {
        let mut instance =
            instance(r#"{"memory":{"size":0,"zones":[{"id":"a","size":1048576},{"id":"b","size":2097152}]}}"#);
        assert_eq!(instance.config().memory.total(), 3 << 20);
        let resize = Resize { desired_ram: Some(4 << 20), ..Resize::default() };
        assert_eq!(instance.resize(&resize).unwrap_err().kind, ErrorKind::Invalid);
        assert_eq!(instance.config().memory.total(), 3 << 20);
    }

    #[test]
    fn memory_of_a_vm_that_is_not_booted_is_what_its_next_start_has() {
        for config in ["{}", r#"{"memory":{"hotplug_size":1073741824}}"#] {
            let mut instance = instance(config);
            let before = instance.config().clone();
            for size in [1 << 30, 256 << 20] {
                instance.resize(&Resize { desired_ram: Some(size), ..Resize::default() }).unwrap();
                assert_eq!(instance.config().memory.size, size);
            }
            let now = instance.config();
            assert_eq!((&now.memory.hotplug_size, &now.net), (&before.memory.hotplug_size, &before.net));
        }
    }

    #[test]
    fn a_balloon_takes_any_size_below_the_guests_memory_and_keeps_it() {
        let mut instance = instance(r#"{"memory":{"size":1073741824},"balloon":{"size":1048576}}"#);
        let mut resize = |bytes| {
            let answer = instance.resize(&Resize { desired_balloon: Some(bytes), ..Resize::default() });
            (answer.map_err(|failure| failure.chain.join(": ")), instance.config().balloon.as_ref().unwrap().size)
        };
        assert_eq!(resize((1 << 30) - 4096), (Ok(()), (1 << 30) - 4096));
        assert_eq!(resize(0), (Ok(()), 0));
        let refused = "desired_balloon=1073741824: the guest has 1G of memory, and cannot return all of it; give less";
        assert_eq!(resize(1 << 30), (Err(refused.to_string()), 0));
        let mut both = |desired_ram, desired_balloon| {
            let answer = instance.resize(&Resize { desired_ram, desired_balloon, ..Resize::default() });
            answer.map_err(|failure| failure.chain.join(": "))
        };
        assert_eq!(both(Some(2 << 30), Some(1 << 30)), Ok(()));
        let refused = "desired_ram=1073741824: the balloon has 1G; ask for more memory, or for a smaller balloon";
        assert_eq!(both(Some(1 << 30), None), Err(refused.to_string()));
        assert_eq!(both(Some(1 << 30), Some(0)), Ok(()));
    }

    #[test]
    fn the_queues_of_devices_are_planned_for_the_most_vcpus_that_the_vm_had() {
        let mut instance = instance(r#"{"cpus":{"boot_vcpus":2,"max_vcpus":4},"net":[{"num_queues":4}]}"#);
        let vcpus = |desired_vcpus| Resize { desired_vcpus: Some(desired_vcpus), ..Resize::default() };
        let add = |instance: &mut Instance, net: &str| instance.add_net(net.parse().unwrap(), Vec::new()).is_ok();
        instance.resize(&vcpus(1)).unwrap();
        assert!(add(&mut instance, "id=a,num_queues=4") && !add(&mut instance, "id=b,num_queues=6"));
        instance.resize(&vcpus(3)).unwrap();
        assert!(add(&mut instance, "id=c,num_queues=6"));
        assert_eq!(instance.vcpus(), 3);
        // What the VM has stays possible, and so does as much as it has.
        instance.resize(&vcpus(1)).unwrap();
        assert!(add(&mut instance, "id=d,num_queues=6"));
        let refused = instance.add_net("id=b,num_queues=8".parse().unwrap(), Vec::new()).unwrap_err().to_string();
        assert_eq!(
            refused,
            "--net id=b,num_queues=8: 4 queue pairs, but the VM was created with or resized to 3 vCPUs; give at \
             most 6, or more vCPUs"
        );
    }
}
