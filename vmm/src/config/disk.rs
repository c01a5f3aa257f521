//! The rules for disks, and their plans.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use virtio_devices::{BlockSpec, ImageFormat, LockGranularity, RateLimits, VhostUserDeviceSpec, VhostUserKind};
use vm_api::config::disk::{DiskConfig, ImageType, RateLimitGroupConfig};
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::unsupported::IMAGE_TYPE;

use crate::config::common_keys::CommonKeys;
use crate::config::device::{DeviceKind, DevicePlan};
use crate::config::net::nic::QUEUE_SIZES;
use crate::config::queue_affinity;
use crate::config::rate;
use crate::config::socket;
use crate::config::subject::Subject;

/// The longest serial number in bytes (`virtio 1.4 §5.2.6`).
const SERIAL: usize = 20;

/// Plans the disks of a VM with `vcpus` vCPUs. Their ids are unique among disks, and no disk writes the image of
/// another.
///
/// # Errors
///
/// Fails with the first mistake.
pub(crate) fn plan(
    disks: &[DiskConfig],
    ids: Vec<String>,
    groups: &[RateLimitGroupConfig],
    vcpus: u32,
    warnings: &mut Vec<String>,
) -> Result<Vec<DevicePlan>, ConfigError> {
    let groups = rate::plan_groups(groups)?;
    let subject = |index: usize, disk: &DiskConfig| Subject::device("--disk", disk.id.as_deref(), index, disks.len());
    let limits = |(index, disk): (usize, &DiskConfig)| check(disk, &subject(index, disk), &groups, vcpus);
    let limits = disks.iter().enumerate().map(limits).collect::<Result<Vec<_>, _>>()?;
    check_apart(disks, &ids, subject)?;
    warnings.extend(disks.iter().enumerate().flat_map(|(n, disk)| queue_affinity::warnings(disk, &subject(n, disk))));
    let plan = |((disk, id), limits): ((&DiskConfig, String), _)| DevicePlan {
        flag: "--disk",
        id: id.clone(),
        pci_segment: disk.pci_segment,
        pci_device_id: disk.pci_device_id,
        iommu: disk.iommu,
        kind: match &disk.vhost_socket {
            Some(socket) => DeviceKind::VhostUser(VhostUserDeviceSpec {
                id,
                kind: VhostUserKind::Disk,
                queue_sizes: vec![disk.queue_size; disk.num_queues.into()],
                socket: socket.clone(),
            }),
            None => DeviceKind::Disk(spec(disk, id, limits)),
        },
    };
    Ok(disks.iter().zip(ids).zip(limits).map(plan).collect())
}

/// Checks a disk by itself, and plans its rate limits.
fn check(
    disk: &DiskConfig,
    subject: &Subject,
    groups: &HashMap<String, RateLimits>,
    vcpus: u32,
) -> Result<RateLimits, ConfigError> {
    let fail = |key: &str, value: String, problem| Err(ConfigError::new(subject.key(key, value), problem));
    let keys = CommonKeys { id: disk.id.as_deref(), slot: (disk.pci_segment, disk.pci_device_id) };
    keys.check("--disk", subject)?;
    check_image_type(disk, subject)?;
    check_vhost_user(disk, subject)?;
    queue_affinity::check(disk, subject)?;
    if !disk.vhost_user && disk.path.as_deref().is_none_or(|path| path.as_os_str().is_empty()) {
        let what = "needs path=: an image in a file, or a block device".to_string();
        return Err(ConfigError::new(subject.bare(), Problem::Missing(what)));
    }
    let DiskConfig { num_queues: queues, queue_size, .. } = *disk;
    if queues == 0 {
        let what = "a disk needs a queue; give 1 or more".to_string();
        return fail("num_queues", queues.to_string(), Problem::Value(what));
    }
    if u32::from(queues) > vcpus {
        let what = format!(
            "more queues than the {vcpus} vCPUs that the VM was created with or resized to; give at most {vcpus}, \
             or more vCPUs"
        );
        return fail("num_queues", queues.to_string(), Problem::Conflict(what));
    }
    if !queue_size.is_power_of_two() || !QUEUE_SIZES.contains(&queue_size) {
        let (least, most) = (QUEUE_SIZES.start(), QUEUE_SIZES.end());
        let what = format!("not a power of two from {least} to {most}; 128 is usual");
        return fail("queue_size", queue_size.to_string(), Problem::Value(what));
    }
    if let Some(serial) = disk.serial.as_ref().filter(|serial| serial.len() > SERIAL) {
        let what = format!("{} bytes; a serial number has at most {SERIAL}, shorten it", serial.len());
        return fail("serial", serial.clone(), Problem::Value(what));
    }
    let own = disk.rate_limiter_config.as_ref().map_or(Ok(RateLimits::default()), |own| rate::plan(own, subject))?;
    let Some(group) = &disk.rate_limit_group else { return Ok(own) };
    if own != RateLimits::default() {
        let what = "the disk has rate limits of its own; leave them out, or the group".to_string();
        return fail("rate_limit_group", group.clone(), Problem::Conflict(what));
    }
    match groups.get(group) {
        Some(limits) => Ok(*limits),
        None => {
            let what = format!("there is no such group; add --rate-limit-group id={group}");
            fail("rate_limit_group", group.clone(), Problem::Missing(what))
        }
    }
}

/// Checks that a disk is either an image or a vhost-user backend, and that no key sets what a backend alone decides.
fn check_vhost_user(disk: &DiskConfig, subject: &Subject) -> Result<(), ConfigError> {
    let conflict = |key: &str, value: String, what: String| {
        Err(ConfigError::new(subject.key(key, value), Problem::Conflict(what)))
    };
    match (disk.vhost_user, &disk.vhost_socket) {
        (false, None) => Ok(()),
        (false, Some(path)) => {
            let what = "only a vhost-user backend has a socket; add vhost_user=on, or leave socket out".to_string();
            conflict("socket", path.display().to_string(), what)
        }
        (true, None) => {
            let what = "needs the backend's socket; add socket=<path>".to_string();
            Err(ConfigError::new(subject.key("vhost_user", "on"), Problem::Missing(what)))
        }
        (true, Some(path)) => {
            let settings = [
                ("path", disk.path.is_some()),
                ("readonly", disk.readonly),
                ("direct", disk.direct),
                ("serial", disk.serial.as_ref().is_some_and(|serial| !serial.is_empty())),
                ("image_type", disk.image_type == ImageType::Qcow2),
                ("sparse", !disk.sparse),
                ("lock_granularity", disk.lock_granularity == vm_api::config::LockGranularity::Full),
                ("rate limits", disk.rate_limiter_config.is_some() || disk.rate_limit_group.is_some()),
            ];
            if let Some((other, _)) = settings.iter().find(|(_, given)| *given) {
                let what = format!("the backend decides on {other}; leave {other} out, or vhost_user");
                return conflict("vhost_user", "on".to_string(), what);
            }
            socket::check(path, subject)
        }
    }
}

/// Refuses the image formats that are not supported yet.
fn check_image_type(disk: &DiskConfig, subject: &Subject) -> Result<(), ConfigError> {
    match disk.image_type {
        ImageType::Raw | ImageType::Unknown | ImageType::Qcow2 => Ok(()),
        other => {
            let remedy = "convert it: qemu-img convert -O raw".to_string();
            let problem = Problem::NotYet { what: IMAGE_TYPE.to_string(), remedy };
            Err(ConfigError::new(subject.key("image_type", other.name()), problem))
        }
    }
}

fn spec(disk: &DiskConfig, id: String, limits: RateLimits) -> BlockSpec {
    BlockSpec {
        id,
        path: disk.path.clone().unwrap_or_default(),
        read_only: disk.readonly,
        direct: disk.direct,
        format: match disk.image_type {
            ImageType::Raw => ImageFormat::Raw,
            ImageType::Qcow2 => ImageFormat::Qcow2 { backing_files: disk.backing_files },
            _ => ImageFormat::Unknown,
        },
        queues: disk.num_queues,
        queue_size: disk.queue_size,
        serial: disk.serial.clone().filter(|serial| !serial.is_empty()),
        limits,
        limit_group: disk.rate_limit_group.clone(),
        sparse: disk.sparse,
        lock: match disk.lock_granularity {
            vm_api::config::LockGranularity::ByteRange => LockGranularity::ByteRange,
            vm_api::config::LockGranularity::Full => LockGranularity::Full,
        },
        io_uring: !disk.disable_io_uring,
        queue_cpus: queue_affinity::plan(disk),
    }
}

/// Checks that no two disks share an id or a slot, and that no disk uses an image that another disk writes.
fn check_apart(
    disks: &[DiskConfig],
    ids: &[String],
    subject: impl Fn(usize, &DiskConfig) -> Subject,
) -> Result<(), ConfigError> {
    let name = |user: usize| ids.get(user).cloned().unwrap_or_default();
    let in_use = |subject: String, what: String, user: String, remedy: &str| {
        Err(ConfigError::new(subject, Problem::InUse { what, user, remedy: remedy.to_string() }))
    };
    let (mut names, mut slots) = (HashSet::new(), HashMap::new());
    let mut images: HashMap<&Path, (usize, bool)> = HashMap::new();
    for (index, disk) in disks.iter().enumerate() {
        if let Some(id) = &disk.id
            && !names.insert(id)
        {
            let user = "another disk".to_string();
            return in_use(format!("--disk id={id}"), "this id".to_string(), user, "give each disk its own");
        }
        if let Some(slot) = disk.pci_device_id
            && let Some(user) = slots.insert((disk.pci_segment, slot), index)
        {
            let subject = subject(index, disk).key("pci_device_id", slot);
            return in_use(subject, format!("slot {slot}"), name(user), "give another, or leave pci_device_id out");
        }
        let Some(path) = &disk.path else { continue };
        if let Some((user, read_only)) = images.insert(path, (index, disk.readonly))
            && !(read_only && disk.readonly)
        {
            let subject = subject(index, disk).key("path", path.display());
            return in_use(
                subject,
                "this image".to_string(),
                name(user),
                "give each its own, or add readonly=on to both",
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plans(disks: &[&str]) -> Result<Vec<BlockSpec>, String> {
        let disks = disks.iter().map(|disk| disk.parse::<DiskConfig>()).collect::<Result<Vec<_>, _>>();
        disks
            .and_then(|disks| plan(&disks, ids(&disks), &[], 4, &mut Vec::new()))
            .map(specs)
            .map_err(|error| error.to_string())
    }

    fn ids(disks: &[DiskConfig]) -> Vec<String> {
        vm_api::config::VmConfig { disks: disks.to_vec(), ..vm_api::config::VmConfig::default() }
            .ids()
            .of::<DiskConfig>()
    }

    fn specs(plans: Vec<DevicePlan>) -> Vec<BlockSpec> {
        let spec = |plan: DevicePlan| match plan.kind {
            DeviceKind::Disk(spec) => spec,
            other => panic!("{other:?}"),
        };
        plans.into_iter().map(spec).collect()
    }

    fn refusal(disks: &[&str]) -> String {
        plans(disks).unwrap_err()
    }

    #[test]
    fn defaults_of_a_disk_are_those_of_cloud_hypervisor() {
        let spec = BlockSpec {
            id: "_disk0".to_string(),
            path: "/a".into(),
            read_only: false,
            direct: false,
            format: ImageFormat::Unknown,
            queues: 1,
            queue_size: 128,
            serial: None,
            limits: RateLimits::default(),
            limit_group: None,
            sparse: true,
            lock: LockGranularity::ByteRange,
            io_uring: true,
            queue_cpus: Vec::new(),
        };
        assert_eq!(plans(&["path=/a"]).unwrap(), [spec]);
        let plans =
            plans(&["path=/a,readonly=on,direct=on,num_queues=4,queue_size=2,serial=abc,image_type=raw"]).unwrap();
        let BlockSpec { read_only, direct, format, queues, queue_size, serial, .. } = &plans[0];
        assert!(*read_only && *direct && *format == ImageFormat::Raw);
        assert_eq!((*queues, *queue_size, serial.as_deref()), (4, 2, Some("abc")));
    }

    #[test]
    fn disks_without_a_name_have_the_lowest_number_that_is_free() {
        let plans = plans(&["path=/a", "path=/b,id=_disk1", "path=/c", "path=/d,id=root"]).unwrap();
        assert_eq!(
            plans.iter().map(|plan| plan.id.as_str()).collect::<Vec<_>>(),
            ["_disk0", "_disk1", "_disk2", "root"]
        );
    }

    #[test]
    fn an_impossible_disk_is_refused_with_a_way_out() {
        for (disk, expected) in [
            ("readonly=on", "--disk: needs path=: an image in a file, or a block device"),
            ("path=/a,num_queues=0", "--disk num_queues=0: a disk needs a queue; give 1 or more"),
            (
                "path=/a,num_queues=5",
                "--disk num_queues=5: more queues than the 4 vCPUs that the VM was created with or resized to; \
                 give at most 4, or more vCPUs",
            ),
            ("path=/a,queue_size=100", "--disk queue_size=100: not a power of two from 2 to 32768; 128 is usual"),
            (
                "path=/a,id=x,serial=123456789012345678901",
                "--disk id=x,serial=123456789012345678901: 21 bytes; a serial number has at most 20, shorten it",
            ),
            (
                "path=/a,pci_device_id=0",
                "--disk pci_device_id=0: bus 0 has slots 1 to 31 for devices; give one of them",
            ),
            (
                "path=/a,id=__x",
                "--disk id=__x: not a device name; use printable characters, and do not start with two underscores",
            ),
            (
                "path=/a,rate_limit_group=x",
                "--disk rate_limit_group=x: there is no such group; add --rate-limit-group id=x",
            ),
            ("path=/a,lock_granularity=byte", "--disk lock_granularity=byte: give byte-range or full"),
            (
                "path=/a,id=x,ops_size=0,ops_refill_time=1",
                "--disk id=x,ops_size=0: nothing could pass; give 1 or more, or 0 for ops_refill_time too",
            ),
            (
                "path=/a,image_type=vhdx",
                "--disk image_type=vhdx: image formats other than raw and qcow2 are not supported yet; \
                 convert it: qemu-img convert -O raw",
            ),
            (
                "path=/a,image_type=vhd",
                "--disk image_type=vhd: image formats other than raw and qcow2 are not supported yet; \
                 convert it: qemu-img convert -O raw",
            ),
        ] {
            assert_eq!(refusal(&[disk]), expected);
        }
        let limited = r#"{"path": "/a", "rate_limiter_config": {"ops": {"size": 1, "refill_time": 1}}}"#;
        let limited = [serde_json::from_str(limited).unwrap()];
        let RateLimits { bandwidth, ops } =
            specs(plan(&limited, ids(&limited), &[], 1, &mut Vec::new()).unwrap())[0].limits;
        assert_eq!((bandwidth, ops.unwrap().size), (None, 1));
    }

    #[test]
    fn the_user_chooses_sparseness_locks_and_engine_of_an_image() {
        let text = "path=/a,sparse=off,lock_granularity=full,_disable_io_uring=on,_disable_aio=on";
        let BlockSpec { sparse, lock, io_uring, .. } = plans(&[text]).unwrap()[0];
        assert!(!sparse && lock == LockGranularity::Full && !io_uring);
        let disk: DiskConfig = text.parse().unwrap();
        let json = serde_json::json!({
            "path": "/a", "sparse": false, "lock_granularity": "Full", "disable_io_uring": true, "disable_aio": true,
        });
        assert_eq!(serde_json::from_value::<DiskConfig>(json).unwrap(), disk);
        assert_eq!(disk.to_string().parse::<DiskConfig>().unwrap(), disk);
    }

    #[test]
    fn a_qcow2_image_has_backing_files_only_if_the_user_allows_it() {
        let format = |disk: &str| plans(&[disk]).unwrap()[0].format;
        let qcow2 = |backing_files| ImageFormat::Qcow2 { backing_files };
        assert_eq!(format("path=/a,image_type=qcow2"), qcow2(false));
        assert_eq!(format("path=/a,image_type=qcow2,backing_files=on"), qcow2(true));
        assert_eq!(format("path=/a,backing_files=on"), ImageFormat::Unknown);
        let json = r#"{"path": "/a", "image_type": "Qcow2", "backing_files": true}"#;
        let disk: DiskConfig = serde_json::from_str(json).unwrap();
        assert_eq!(disk, "path=/a,image_type=qcow2,backing_files=on".parse().unwrap());
    }

    #[test]
    fn disks_of_a_group_have_its_limits() {
        let plans = |groups: &[&str], disk: &str| {
            let groups: Vec<_> = groups.iter().map(|group| group.parse().unwrap()).collect();
            plan(&[disk.parse().unwrap()], vec!["d".to_string()], &groups, 1, &mut Vec::new())
                .map(specs)
                .map_err(|error| error.to_string())
        };
        let group = "id=g,ops_size=10,ops_refill_time=1000";
        let spec = &plans(&[group], "path=/a,rate_limit_group=g").unwrap()[0];
        assert_eq!((spec.limit_group.as_deref(), spec.limits.ops.unwrap().size), (Some("g"), 10));
        let own = "path=/a,rate_limit_group=g,bw_size=1,bw_refill_time=1";
        assert_eq!(
            plans(&[group], own).unwrap_err(),
            "--disk rate_limit_group=g: the disk has rate limits of its own; leave them out, or the group"
        );
        assert_eq!(
            plans(&[group, group], "path=/a").unwrap_err(),
            "--rate-limit-group id=g: this id is already in use by another group; give each group its own"
        );
        for none in ["id=g", "id=g,bw_size=0,bw_refill_time=0"] {
            assert_eq!(
                plans(&[none], "path=/a").unwrap_err(),
                "--rate-limit-group id=g: limits nothing; add bw_size and bw_refill_time, or ops_size and \
                 ops_refill_time"
            );
        }
    }

    #[test]
    fn vhost_user_disk_needs_a_socket_and_refuses_backend_settings() {
        let disks = ["id=x,vhost_user=on,socket=/s,num_queues=2,queue_size=64".parse().unwrap()];
        let kind = VhostUserKind::Disk;
        let spec = VhostUserDeviceSpec { id: "x".into(), kind, queue_sizes: vec![64; 2], socket: "/s".into() };
        assert_eq!(plan(&disks, ids(&disks), &[], 4, &mut Vec::new()).unwrap()[0].kind, DeviceKind::VhostUser(spec));
        for (disk, expected) in [
            ("vhost_user=on", "--disk vhost_user=on: needs the backend's socket; add socket=<path>"),
            (
                "path=/a,socket=/s",
                "--disk socket=/s: only a vhost-user backend has a socket; add vhost_user=on, or leave socket out",
            ),
            (
                "path=/a,vhost_user=on,socket=/s",
                "--disk vhost_user=on: the backend decides on path; leave path out, or vhost_user",
            ),
            (
                "vhost_user=on,socket=/s,bw_size=1,bw_refill_time=1",
                "--disk vhost_user=on: the backend decides on rate limits; leave rate limits out, or vhost_user",
            ),
            (
                "vhost_user=on,socket=/s,sparse=off",
                "--disk vhost_user=on: the backend decides on sparse; leave sparse out, or vhost_user",
            ),
            (
                "vhost_user=on,socket=/s,readonly=on",
                "--disk vhost_user=on: the backend decides on readonly; \
                leave readonly out, or vhost_user",
            ),
        ] {
            assert_eq!(refusal(&[disk]), expected);
        }
    }

    #[test]
    fn disks_have_nothing_in_common_but_what_is_only_read() {
        assert_eq!(
            refusal(&["path=/a,id=x", "path=/b,id=x"]),
            "--disk id=x: this id is already in use by another disk; give each disk its own"
        );
        assert_eq!(
            refusal(&["path=/a,pci_device_id=3", "path=/b,pci_device_id=3"]),
            "--disk number 2, pci_device_id=3: slot 3 is already in use by _disk0; give another, or leave \
             pci_device_id out"
        );
        for (first, second) in [("", ""), (",readonly=on", ""), ("", ",readonly=on")] {
            assert_eq!(
                refusal(&[&format!("path=/a{first}"), &format!("path=/a{second}")]),
                "--disk number 2, path=/a: this image is already in use by _disk0; \
                 give each its own, or add readonly=on to both"
            );
        }
        assert!(plans(&["path=/a,readonly=on", "path=/a,readonly=on"]).is_ok());
    }

    #[test]
    fn json_names_formats_as_cloud_hypervisor_does() {
        let disk: DiskConfig = serde_json::from_str(r#"{"path": "/a", "image_type": "Raw"}"#).unwrap();
        assert_eq!(disk, "path=/a,image_type=raw".parse().unwrap());
        assert_eq!(disk.to_string().parse::<DiskConfig>().unwrap(), disk);
    }
}
