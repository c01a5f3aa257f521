//! The rules for shared file systems and for vhost-user devices of any type, and their plans.

use std::collections::HashMap;

use virtio_devices::{VhostUserDeviceSpec, VhostUserKind};
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::virtio::fs::FsConfig;
use vm_api::config::virtio::generic_vhost_user::{DeviceType, GenericVhostUserConfig};

use crate::config::common_keys::{CommonKeys, check_ids};
use crate::config::device::{DeviceKind, DevicePlan};
use crate::config::net::nic::QUEUE_SIZES;
use crate::config::socket;
use crate::config::subject::Subject;

const FS: &str = "--fs";
const GENERIC: &str = "--generic-vhost-user";
/// The longest tag of a file system in bytes (`virtio 1.4 §5.11.4`).
const TAG: usize = 36;
/// The most queues: the vhost-user protocol numbers them with 8 bits.
const MAX_QUEUES: usize = 256;
/// The largest number of a type: the rest of a PCI device ID of `virtio 1.4 §4.1.2`.
const MAX_TYPE: u32 = 0x3f;
/// Types that this program refuses, and their names: a virtual IOMMU needs access to the other devices, and a watchdog
/// to the machine.
const REFUSED: [(u32, &str); 2] = [(23, "virtual IOMMUs"), (35, "watchdogs")];

/// Plans the shared file systems of a VM with `vcpus` vCPUs.
///
/// # Errors
///
/// Fails with the first mistake.
pub(crate) fn plan_fs(all: &[FsConfig], ids: Vec<String>, vcpus: u32) -> Result<Vec<DevicePlan>, ConfigError> {
    let mut tags = HashMap::new();
    let mut plans = Vec::with_capacity(all.len());
    for (index, (fs, id)) in all.iter().zip(ids).enumerate() {
        let subject = Subject::device(FS, fs.id.as_deref(), index, all.len());
        check_fs(fs, &subject, vcpus)?;
        if let Some(user) = tags.insert(fs.tag.clone(), id.clone()) {
            let (what, remedy) = ("this tag".to_string(), "give each file system its own".to_string());
            return Err(ConfigError::new(subject.key("tag", &fs.tag), Problem::InUse { what, user, remedy }));
        }
        let spec = VhostUserDeviceSpec {
            id,
            kind: VhostUserKind::FileSystem { tag: fs.tag.clone() },
            queue_sizes: vec![fs.queue_size; usize::from(fs.num_queues) + 1],
            socket: fs.socket.clone(),
        };
        plans.push(device(FS, (fs.pci_segment, fs.pci_device_id), spec));
    }
    check_ids(FS, &plans)?;
    Ok(plans)
}

fn check_fs(fs: &FsConfig, subject: &Subject, vcpus: u32) -> Result<(), ConfigError> {
    let fail = |key: &str, value: String, problem| Err(ConfigError::new(subject.key(key, value), problem));
    let keys = CommonKeys { id: fs.id.as_deref(), slot: (fs.pci_segment, fs.pci_device_id) };
    keys.check(FS, subject)?;
    if fs.tag.is_empty() || fs.tag.len() > TAG || fs.tag.contains('\0') {
        let what = format!("a tag has 1 to {TAG} bytes, none of them 0; give another");
        return fail("tag", fs.tag.clone(), Problem::Value(what));
    }
    socket::check(&fs.socket, subject)?;
    if fs.num_queues == 0 {
        let what = "a file system needs a request queue; give 1 or more".to_string();
        return fail("num_queues", fs.num_queues.to_string(), Problem::Value(what));
    }
    if u32::from(fs.num_queues) > vcpus {
        let what = format!(
            "more queues than the {vcpus} vCPUs that the VM was created with or resized to; give at most {vcpus}, \
             or more vCPUs"
        );
        return fail("num_queues", fs.num_queues.to_string(), Problem::Conflict(what));
    }
    check_size("queue_size", fs.queue_size, subject)
}

/// Plans the vhost-user devices of any type.
///
/// # Errors
///
/// Fails with the first mistake.
pub(crate) fn plan_generic(all: &[GenericVhostUserConfig], ids: Vec<String>) -> Result<Vec<DevicePlan>, ConfigError> {
    let mut plans = Vec::with_capacity(all.len());
    for (index, (config, id)) in all.iter().zip(ids).enumerate() {
        let subject = Subject::device(GENERIC, config.id.as_deref(), index, all.len());
        let device_type = check_generic(config, &subject)?;
        let (queue_sizes, socket) = (config.queue_sizes.clone(), config.socket.clone());
        let spec = VhostUserDeviceSpec { id, kind: VhostUserKind::Other { device_type }, queue_sizes, socket };
        plans.push(device(GENERIC, (config.pci_segment, config.pci_device_id), spec));
    }
    check_ids(GENERIC, &plans)?;
    Ok(plans)
}

/// Checks a device by itself, and returns its type.
fn check_generic(config: &GenericVhostUserConfig, subject: &Subject) -> Result<u16, ConfigError> {
    let keys = CommonKeys { id: config.id.as_deref(), slot: (config.pci_segment, config.pci_device_id) };
    keys.check(GENERIC, subject)?;
    let device_type = check_type(config, subject)?;
    socket::check(&config.socket, subject)?;
    if config.queue_sizes.is_empty() || config.queue_sizes.len() > MAX_QUEUES {
        let what = format!("{} queues; give the sizes of 1 to {MAX_QUEUES}", config.queue_sizes.len());
        return Err(ConfigError::new(subject.key("queue_sizes", "[...]"), Problem::Value(what)));
    }
    config.queue_sizes.iter().try_for_each(|size| check_size("queue_sizes", *size, subject))?;
    Ok(device_type)
}

fn check_type(config: &GenericVhostUserConfig, subject: &Subject) -> Result<u16, ConfigError> {
    let (key, DeviceType(number)) = match (config.device_type, config.virtio_id) {
        (Some(new), None) => ("device_type", new),
        (None, Some(old)) => ("virtio_id", old),
        (Some(_), Some(old)) => {
            let what = "the older name of device_type, which is there too; leave virtio_id out".to_string();
            return Err(ConfigError::new(subject.key("virtio_id", old.0), Problem::Conflict(what)));
        }
        (None, None) => {
            let what = "needs device_type=: the number or the name of a type of virtio device".to_string();
            return Err(ConfigError::new(subject.bare(), Problem::Missing(what)));
        }
    };
    let fail = |what| Err(ConfigError::new(subject.key(key, number), Problem::Value(what)));
    if let Some((_, kind)) = REFUSED.iter().find(|(refused, _)| *refused == number) {
        return fail(format!("{kind} cannot be run by a vhost-user backend; leave this device out"));
    }
    match u16::try_from(number) {
        Ok(device_type) if (1..=MAX_TYPE).contains(&number) => Ok(device_type),
        _ => fail(format!("types of virtio devices have numbers from 1 to {MAX_TYPE}; give one of them")),
    }
}

fn check_size(key: &str, size: u16, subject: &Subject) -> Result<(), ConfigError> {
    if size.is_power_of_two() && QUEUE_SIZES.contains(&size) {
        return Ok(());
    }
    let (least, most) = (QUEUE_SIZES.start(), QUEUE_SIZES.end());
    let what = format!("not a power of two from {least} to {most}; 1024 is usual");
    Err(ConfigError::new(subject.key(key, size), Problem::Value(what)))
}

fn device(flag: &'static str, place: (u16, Option<u8>), spec: VhostUserDeviceSpec) -> DevicePlan {
    let (pci_segment, pci_device_id) = place;
    DevicePlan {
        flag,
        id: spec.id.clone(),
        pci_segment,
        pci_device_id,
        iommu: false,
        kind: DeviceKind::VhostUser(spec),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fs(all: &[&str]) -> Result<Vec<DevicePlan>, String> {
        let all: Vec<_> = all.iter().map(|fs| fs.parse().unwrap()).collect();
        plan_fs(&all, vm_api::config::VmConfig { fs: all.clone(), ..Default::default() }.ids().of::<FsConfig>(), 2)
            .map_err(|error| error.to_string())
    }

    fn generic(text: &str) -> Result<Vec<DevicePlan>, String> {
        plan_generic(&[text.parse().unwrap()], vec!["_generic_vhost_user0".to_string()])
            .map_err(|error| error.to_string())
    }

    fn spec(plan: &DevicePlan) -> &VhostUserDeviceSpec {
        match &plan.kind {
            DeviceKind::VhostUser(spec) => spec,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_file_system_has_a_queue_more_than_it_was_given() {
        let plans =
            fs(&["tag=a,socket=/a", "tag=b,socket=/b,num_queues=2,queue_size=64,id=b,pci_device_id=9"]).unwrap();
        assert_eq!((plans[0].option(), plans[1].pci_device_id), ("--fs id=_fs0".to_string(), Some(9)));
        let kind = VhostUserKind::FileSystem { tag: "b".to_string() };
        let expected = VhostUserDeviceSpec { id: "b".into(), kind, queue_sizes: vec![64; 3], socket: "/b".into() };
        assert_eq!((spec(&plans[0]).queue_sizes.as_slice(), spec(&plans[1])), (&[1024, 1024][..], &expected));
    }

    #[test]
    fn an_impossible_file_system_is_refused_with_a_way_out() {
        let long = format!("tag={},socket=/a", "x".repeat(37));
        for (all, expected) in [
            (&[long.as_str()][..], ": a tag has 1 to 36 bytes, none of them 0; give another"),
            (
                &["tag=a,socket=/a,num_queues=0"],
                "--fs num_queues=0: a file system needs a request queue; give 1 or more",
            ),
            (
                &["tag=a,socket=/a,num_queues=3"],
                "--fs num_queues=3: more queues than the 2 vCPUs that the VM was created with or resized to; \
                 give at most 2, or more vCPUs",
            ),
            (
                &["tag=a,socket=/a,queue_size=100"],
                "--fs queue_size=100: not a power of two from 2 to 32768; 1024 is usual",
            ),
            (
                &["tag=a,socket=/a", "tag=a,socket=/b"],
                "--fs number 2, tag=a: this tag is already in use by _fs0; give each file system its own",
            ),
            (
                &["tag=a,socket=/a,id=x", "tag=b,socket=/b,id=x"],
                "--fs id=x: this id is already in use by another device; give each device its own",
            ),
            (
                &["tag=a,socket=/a,pci_device_id=0"],
                "--fs pci_device_id=0: bus 0 has slots 1 to 31 for devices; give one of them",
            ),
        ] {
            let said = fs(all).unwrap_err();
            assert!(said.ends_with(expected), "{said}");
        }
        let long = format!("tag=a,socket=/{}", "x".repeat(107));
        assert!(
            fs(&[&long]).unwrap_err().ends_with("108 bytes; the path of a Unix socket has at most 107, shorten it")
        );
    }

    #[test]
    fn a_device_of_any_type_has_the_queues_that_it_was_given() {
        let plans = generic("device_type=i2c,socket=/s,queue_sizes=[64,128]").unwrap();
        let (id, kind) = ("_generic_vhost_user0".into(), VhostUserKind::Other { device_type: 34 });
        let expected = VhostUserDeviceSpec { id, kind, queue_sizes: vec![64, 128], socket: "/s".into() };
        assert_eq!(spec(&plans[0]), &expected);
        assert_eq!(generic("virtio_id=34,socket=/s,queue_sizes=[64,128]").unwrap(), plans);
    }

    #[test]
    fn a_type_that_no_backend_can_run_is_refused_by_name() {
        for (key, what) in [
            ("virtio_id=35", "virtio_id=35: watchdogs cannot be run by a vhost-user backend; leave this device out"),
            (
                "device_type=iommu",
                "device_type=23: virtual IOMMUs cannot be run by a vhost-user backend; leave this device out",
            ),
            ("device_type=64", "device_type=64: types of virtio devices have numbers from 1 to 63; give one of them"),
            ("device_type=0", "device_type=0: types of virtio devices have numbers from 1 to 63; give one of them"),
            (
                "device_type=1,virtio_id=1",
                "virtio_id=1: the older name of device_type, which is there too; leave virtio_id out",
            ),
        ] {
            let said = generic(&format!("{key},socket=/s,queue_sizes=[64]")).unwrap_err();
            assert_eq!(said, format!("--generic-vhost-user {what}"));
        }
        let said = generic("socket=/s,queue_sizes=[64]").unwrap_err();
        assert!(said.starts_with("--generic-vhost-user: needs device_type=:"), "{said}");
        let said = generic("device_type=1,socket=/s,queue_sizes=[3]").unwrap_err();
        assert!(said.starts_with("--generic-vhost-user queue_sizes=3: not a power of two"), "{said}");
    }
}
