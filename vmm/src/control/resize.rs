//! Checks of a `vm.resize` request.

use vm_api::config::error::shortened;
use vm_api::config::id::LONGEST;

use crate::api::{Failure, Resize, ResizeZone};
use crate::config::{HotplugMethod, MemoryConfig, VmConfig, bytes as text, virtio::balloon};
use crate::error_kind::ErrorKind;

/// Returns the requested number of vCPUs, 1 to the maximum of `config`; `None` for no change.
///
/// # Errors
///
/// Fails if the request exceeds the maximum, or sets a memory size although memory consists of zones.
pub(crate) fn vcpus(resize: &Resize, config: &VmConfig) -> Result<Option<u8>, Failure> {
    let max = config.cpus.max_vcpus;
    let refuse = |line: String| Err(Failure::new(ErrorKind::Invalid, line));
    if let Some(ram) = resize.desired_ram
        && !config.memory.zones.is_empty()
    {
        return refuse(format!(
            "desired_ram={ram}: this VM's memory consists of zones, whose sizes vm.resize-zone changes; leave it out"
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

/// Returns the requested balloon size in bytes; `None` for no change.
///
/// # Errors
///
/// Fails if there is no balloon, or memory would be too small for it.
pub(crate) fn balloon(resize: &Resize, config: &VmConfig) -> Result<Option<u64>, Failure> {
    let memory = resize.desired_ram.unwrap_or(config.memory.wanted());
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

/// Returns `memory` resized to `size` bytes in total. With virtio-mem, the device provides what exceeds the boot
/// memory.
///
/// # Errors
///
/// Fails if `size` is less than the boot memory.
pub(crate) fn memory(size: u64, memory: &MemoryConfig) -> Result<MemoryConfig, Failure> {
    let mut next = memory.clone();
    if memory.hotplug_method == HotplugMethod::Acpi {
        next.size = size;
        return Ok(next);
    }
    let hotplugged = size.checked_sub(memory.size).ok_or_else(|| below_boot("desired_ram", size, memory.size))?;
    next.hotplugged_size = Some(hotplugged);
    Ok(next)
}

/// The warning about a requested size that a guest with `present` bytes of memory gets only at its next boot, as in
/// Cloud Hypervisor.
pub(crate) fn deferred(size: u64, present: Option<u64>, memory: &MemoryConfig) -> Option<String> {
    let present = present.filter(|present| memory.hotplug_method == HotplugMethod::Acpi && *present != size)?;
    let why = if present > size {
        "memory is only taken away with --memory hotplug_method=virtio-mem"
    } else {
        "the VM has no --memory hotplug_size"
    };
    let [size, present] = [size, present].map(text);
    Some(format!("vm: vm.resize: the guest keeps {present} of memory, and has {size} from its next boot on: {why}"))
}

/// Returns the memory of `config` with the requested size of a zone.
///
/// # Errors
///
/// Fails if there is no such zone, the size is less than at boot, or memory would be too small for the balloon.
pub(crate) fn zone(resize: &ResizeZone, config: &VmConfig) -> Result<MemoryConfig, Failure> {
    let ResizeZone { id, desired_ram } = resize;
    let mut next = config.memory.clone();
    let zone = next.zones.iter_mut().find(|zone| zone.id == *id).ok_or_else(|| {
        let line = format!("there is no memory zone {}; vm.info lists the zones", shortened(id, LONGEST));
        Failure::new(ErrorKind::NotFound, line)
    })?;
    let request = || format!("id={id},desired_ram");
    let hotplugged =
        desired_ram.checked_sub(zone.size).ok_or_else(|| below_boot(&request(), *desired_ram, zone.size))?;
    zone.hotplugged_size = Some(hotplugged);
    let kept = config.balloon.as_ref().map_or(0, |balloon| balloon.size);
    if kept > 0 && balloon::check_size(kept, next.wanted()).is_err() {
        let what = format!("the balloon has {}; ask for more memory, or for a smaller balloon", text(kept));
        return Err(Failure::new(ErrorKind::Invalid, format!("{}={desired_ram}: {what}", request())));
    }
    Ok(next)
}

/// Error of removing boot memory.
fn below_boot(request: &str, size: u64, boot: u64) -> Failure {
    let what = format!("memory of the start, {}, is not taken away; ask for that or more", text(boot));
    Failure::new(ErrorKind::Invalid, format!("{request}={size}: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::NewDevice;
    use crate::config::PlannedVm;
    use crate::control::instance::Instance;
    use crate::telemetry::events::Events;
    use crate::vm::host_limits::HostLimits;

    #[test]
    fn a_size_that_waits_for_the_next_boot_is_warned_of() {
        let acpi: MemoryConfig = "size=1G".parse().unwrap();
        assert_eq!([deferred(2 << 30, None, &acpi), deferred(1 << 30, Some(1 << 30), &acpi)], [None, None]);
        let more = deferred(2 << 30, Some(1 << 30), &acpi).unwrap();
        assert_eq!(
            more,
            "vm: vm.resize: the guest keeps 1G of memory, and has 2G from its next boot on: the VM has no --memory \
             hotplug_size"
        );
        assert!(deferred(1 << 29, Some(1 << 30), &acpi).unwrap().ends_with("hotplug_method=virtio-mem"));
        let devices: MemoryConfig = "size=1G,hotplug_size=1G,hotplug_method=virtio-mem".parse().unwrap();
        assert_eq!(deferred(2 << 30, Some(1 << 30), &devices), None);
    }

    fn instance(config: &str) -> Instance {
        Instance::new(
            PlannedVm::new(serde_json::from_str(config).unwrap()).unwrap(),
            Events::default(),
            HostLimits::default(),
        )
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
    fn a_memory_device_has_what_is_beyond_the_memory_at_boot() {
        let mut instance = instance(
            r#"{"memory":{"size":536870912,"hotplug_method":"VirtioMem","hotplug_size":1073741824},"balloon":{}}"#,
        );
        let mut resize = |size: u64, balloon| {
            let resize = Resize { desired_ram: Some(size), desired_balloon: balloon, ..Resize::default() };
            let answer = instance.resize(&resize).map_err(|failure| failure.chain.join(": "));
            let memory = &instance.config().memory;
            assert_eq!(memory.size, 512 << 20);
            (answer, memory.hotplugged_size)
        };
        assert_eq!(resize(1536 << 20, None), (Ok(()), Some(1 << 30)));
        assert_eq!(resize(1 << 30, Some(768 << 20)), (Ok(()), Some(512 << 20)));
        for (size, balloon, what) in [
            ((1536 << 20) + (2 << 20), None, "there is room for 1G (hotplug_size); give less, or more room"),
            ((512 << 20) + 4096, Some(0), "memory is added in steps of 2M; give a multiple of that"),
            (512 << 20, None, "the balloon has 768M; ask for more memory, or for a smaller balloon"),
        ] {
            assert_eq!(resize(size, balloon), (Err(format!("desired_ram={size}: {what}")), Some(512 << 20)));
        }
        assert_eq!(resize(512 << 20, Some(0)), (Ok(()), Some(0)));
        let refused = "desired_ram=1048576: memory of the start, 512M, is not taken away; ask for that or more";
        assert_eq!(resize(1 << 20, None), (Err(refused.to_string()), Some(0)));
    }

    #[test]
    fn a_zone_is_resized_alone() {
        let mut instance = instance(
            r#"{"memory":{"size":0,"hotplug_method":"VirtioMem","zones":[{"id":"a","size":1073741824},
                {"id":"b","size":1073741824,"hotplug_size":1073741824,"hotplugged_size":2097152}]},
                "balloon":{"size":3145728}}"#,
        );
        let mut resize = |id: &str, desired_ram| {
            let answer = instance.resize_zone(&ResizeZone { id: id.to_string(), desired_ram });
            let sizes: Vec<_> = instance.config().memory.zones.iter().map(|zone| zone.hotplugged_size).collect();
            (answer.map_err(|failure| failure.chain.join(": ")), [sizes[0], sizes[1]])
        };
        assert_eq!(resize("b", 2 << 30), (Ok(()), [None, Some(1 << 30)]));
        for (id, size, what) in [
            ("c", 1, "there is no memory zone c; vm.info lists the zones"),
            ("a", 2 << 30, "id=a,desired_ram=2147483648: there is room for 0 (hotplug_size); give less, or more room"),
            (
                "b",
                1 << 20,
                "id=b,desired_ram=1048576: memory of the start, 1G, is not taken away; ask for that or more",
            ),
        ] {
            assert_eq!(resize(id, size), (Err(what.to_string()), [None, Some(1 << 30)]));
        }
        assert_eq!(resize("b", 1 << 30), (Ok(()), [None, Some(0)]));
        let resize = Resize { desired_ram: Some(2 << 30), ..Resize::default() };
        assert_eq!(instance.resize(&resize).unwrap_err().kind, ErrorKind::Invalid);
    }

    #[test]
    fn balloon_takes_any_size_below_guest_memory_and_keeps_it() {
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
    fn device_queues_are_planned_for_the_most_vcpus_the_vm_had() {
        let mut instance = instance(r#"{"cpus":{"boot_vcpus":2,"max_vcpus":4},"net":[{"num_queues":4}]}"#);
        let vcpus = |desired_vcpus| Resize { desired_vcpus: Some(desired_vcpus), ..Resize::default() };
        let try_add = |instance: &mut Instance, net: &str| {
            instance.add(NewDevice::Net(Box::new(net.parse().unwrap()), Vec::new())).map_err(|error| error.to_string())
        };
        let add = |instance: &mut Instance, net: &str| try_add(instance, net).is_ok();
        instance.resize(&vcpus(1)).unwrap();
        assert!(add(&mut instance, "id=a,num_queues=4") && !add(&mut instance, "id=b,num_queues=6"));
        instance.resize(&vcpus(3)).unwrap();
        assert!(add(&mut instance, "id=c,num_queues=6"));
        assert_eq!(instance.vcpus(), 3);
        // The present devices stay valid, and more of the same size can be added.
        instance.resize(&vcpus(1)).unwrap();
        assert!(add(&mut instance, "id=d,num_queues=6"));
        let refused = try_add(&mut instance, "id=b,num_queues=8").unwrap_err();
        assert_eq!(
            refused,
            "num_queues=8: 4 queue pairs, but the VM was created with or resized to 3 vCPUs; give at \
             most 6, or more vCPUs"
        );
    }
}
