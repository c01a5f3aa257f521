//! Disks: `--disk`.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use virtio_devices::RateLimits;

use crate::config_error::{ConfigError, Problem};
use crate::config_names::{check_id, numbered};
use crate::config_nic::{QUEUE_SIZES, Subject};
use crate::config_rate::RateLimiterConfig;
use crate::config_value::{Value, options};

/// Slots of bus 0 for devices.
const SLOTS: std::ops::RangeInclusive<u8> = 1..=31;
/// The longest serial number in bytes (`virtio 1.4 §5.2.6`).
const SERIAL: usize = 20;

options! {
    /// A disk: a raw image in a file, or a block device of the host.
    pub struct DiskConfig for "--disk" {
        /// Name of the device, unique in the VM; not starting with two underscores; if it is left out, _disk0, _disk1 and so on.
        "id" = "<name>" => id: Option<String> = None;
        /// The image, or the block device.
        "path" = "<path>" => path: Option<PathBuf> = None;
        /// Whether the guest can only read it.
        "readonly" = "on|off" => readonly: bool = false;
        /// Whether it is read and written around the host's page cache.
        "direct" = "on|off" => direct: bool = false;
        /// Number of queues: one for each vCPU at most.
        "num_queues" = "<number>" => num_queues: u16 = 1;
        /// Entries of each queue: a power of two from 2 to 32768.
        "queue_size" = "<number>" => queue_size: u16 = 128;
        /// Format of the image: only raw so far, which need not be said but of one that begins as another format does.
        "image_type" = "raw" => image_type: Option<ImageType> = None;
        /// Serial number that the guest reads, at most 20 bytes.
        "serial" = "<text>" => serial: Option<String> = None;
        /// PCI segment; only 0 so far.
        "pci_segment" = "<number>" => pci_segment: u16 = 0;
        /// Device number on bus 0, 1 to 31; if it is left out, the lowest that is free.
        "pci_device_id" = "<number>" => pci_device_id: Option<u8> = None;
        /// Whether the device is behind a virtual IOMMU; only off so far.
        "iommu" = "on|off" => iommu: bool = false;
    }
    parts {
        /// How much may be read and written, by all queues together.
        rate_limiter_config: RateLimiterConfig;
    }
    later {
        "vhost_user" | "socket" => "disks behind vhost-user are";
        "rate_limit_group" => "groups of rate limits are";
        "queue_affinity" => "pinning of queues is";
        "backing_files" => "images with backing files are";
        "lock_granularity" => "a choice of locks is";
        "sparse" => "a choice of sparse images is";
    }
}

/// The format of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImageType {
    /// The disk's contents, byte by byte.
    Raw,
    /// Not said: raw, but for an image that begins as another format does.
    Unknown,
    /// QEMU's format.
    Qcow2,
    /// Virtual PC's format.
    FixedVhd,
    /// Hyper-V's format.
    Vhdx,
}

impl Value for ImageType {
    fn parse(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "raw" => Ok(Self::Raw),
            "unknown" => Ok(Self::Unknown),
            "qcow2" => Ok(Self::Qcow2),
            "vhd" => Ok(Self::FixedVhd),
            "vhdx" => Ok(Self::Vhdx),
            _ => Err("give raw".to_string()),
        }
    }

    fn print(&self) -> Option<String> {
        let text = match self {
            Self::Raw => "raw",
            Self::Unknown => "unknown",
            Self::Qcow2 => "qcow2",
            Self::FixedVhd => "vhd",
            Self::Vhdx => "vhdx",
        };
        Some(text.to_string())
    }
}

/// One disk, with all that was left out decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskPlan {
    /// The device's name in the VM: what the user gave, or `_disk<N>`. Unique among disks.
    pub id: String,
    /// The device number on bus 0, 1 to 31; `None` for the lowest that is free.
    pub pci_device_id: Option<u8>,
    /// The image, or the block device. No other disk writes it.
    pub path: PathBuf,
    /// Whether the guest can only read it.
    pub read_only: bool,
    /// Whether it is read and written around the host's page cache.
    pub direct: bool,
    /// Whether it is raw though it begins as an image of another format does.
    pub surely_raw: bool,
    /// Queues, 1 or more and at most one for each vCPU.
    pub queues: u16,
    /// The size of each queue: a power of two from 2 to 32768.
    pub queue_size: u16,
    /// The serial number that the guest reads, at most 20 bytes.
    pub serial: Option<String>,
    /// How much its queues together may do.
    pub limits: RateLimits,
}

impl DiskPlan {
    /// Plans the disks of a VM with `vcpus` vCPUs.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub fn of(disks: &[DiskConfig], vcpus: u32) -> Result<Vec<Self>, ConfigError> {
        let subject =
            |index: usize, disk: &DiskConfig| Subject::device("--disk", disk.id.as_deref(), index, disks.len());
        let limits = |(index, disk): (usize, &DiskConfig)| disk.check(&subject(index, disk), vcpus);
        let limits = disks.iter().enumerate().map(limits).collect::<Result<Vec<_>, _>>()?;
        check_apart(disks, subject)?;
        let ids = numbered("_disk", disks.iter().map(|disk| disk.id.as_deref()));
        Ok(disks.iter().zip(ids).zip(limits).map(|((disk, id), limits)| disk.plan(id, limits)).collect())
    }
}

impl DiskConfig {
    /// Checks all but the rate limits, and plans those.
    fn check(&self, subject: &Subject, vcpus: u32) -> Result<RateLimits, ConfigError> {
        let fail = |key: &str, value: String, problem| Err(ConfigError::new(subject.key(key, value), problem));
        if let Some(id) = &self.id {
            check_id(id).map_err(|problem| ConfigError::new(format!("--disk id={id}"), problem))?;
        }
        self.check_supported(subject)?;
        if self.path.as_deref().is_none_or(|path| path.as_os_str().is_empty()) {
            let what = "needs path=: a raw image in a file, or a block device".to_string();
            return Err(ConfigError::new(subject.bare(), Problem::Missing(what)));
        }
        let Self { num_queues: queues, queue_size, .. } = *self;
        if queues == 0 {
            let what = "a disk needs a queue; give 1 or more".to_string();
            return fail("num_queues", queues.to_string(), Problem::Value(what));
        }
        if u32::from(queues) > vcpus {
            let what = format!("more than a VM with --cpus boot={vcpus} can use; give at most {vcpus}, or more vCPUs");
            return fail("num_queues", queues.to_string(), Problem::Conflict(what));
        }
        if !queue_size.is_power_of_two() || !QUEUE_SIZES.contains(&queue_size) {
            let (least, most) = (QUEUE_SIZES.start(), QUEUE_SIZES.end());
            let what = format!("not a power of two from {least} to {most}; 128 is usual");
            return fail("queue_size", queue_size.to_string(), Problem::Value(what));
        }
        if let Some(serial) = self.serial.as_ref().filter(|serial| serial.len() > SERIAL) {
            let what = format!("has {} bytes, and a serial number has at most {SERIAL}; shorten it", serial.len());
            return fail("serial", serial.clone(), Problem::Value(what));
        }
        if let Some(slot) = self.pci_device_id.filter(|slot| !SLOTS.contains(slot)) {
            let what = format!("bus 0 has slots {} to {} for devices; give one of them", SLOTS.start(), SLOTS.end());
            return fail("pci_device_id", slot.to_string(), Problem::Value(what));
        }
        self.rate_limiter_config.as_ref().map_or(Ok(RateLimits::default()), |config| config.plan(subject))
    }

    fn check_supported(&self, subject: &Subject) -> Result<(), ConfigError> {
        let not_yet = |key: &str, value: String, what: &str, remedy: String| {
            let problem = Problem::NotYet { what: what.to_string(), remedy };
            Err(ConfigError::new(subject.key(key, value), problem))
        };
        let leave_out = |key| format!("leave {key} out");
        if self.iommu {
            return not_yet("iommu", "on".to_string(), "virtual IOMMUs are", leave_out("iommu"));
        }
        if self.pci_segment != 0 {
            let segment = self.pci_segment.to_string();
            return not_yet("pci_segment", segment, "further PCI segments are", leave_out("pci_segment"));
        }
        match self.image_type {
            None | Some(ImageType::Raw | ImageType::Unknown) => Ok(()),
            Some(other) => {
                let value = other.print().unwrap_or_default();
                let remedy = "convert it: qemu-img convert -O raw".to_string();
                not_yet("image_type", value, "images that are not raw are", remedy)
            }
        }
    }

    fn plan(&self, id: String, limits: RateLimits) -> DiskPlan {
        DiskPlan {
            id,
            pci_device_id: self.pci_device_id,
            path: self.path.clone().unwrap_or_default(),
            read_only: self.readonly,
            direct: self.direct,
            surely_raw: self.image_type == Some(ImageType::Raw),
            queues: self.num_queues,
            queue_size: self.queue_size,
            serial: self.serial.clone().filter(|serial| !serial.is_empty()),
            limits,
        }
    }
}

/// No two disks have one id or one slot, and none has an image that another one writes.
fn check_apart(disks: &[DiskConfig], subject: impl Fn(usize, &DiskConfig) -> Subject) -> Result<(), ConfigError> {
    let ids = numbered("_disk", disks.iter().map(|disk| disk.id.as_deref()));
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
            && let Some(user) = slots.insert(slot, index)
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

    fn plan(disks: &[&str]) -> Result<Vec<DiskPlan>, String> {
        let disks = disks.iter().map(|disk| disk.parse::<DiskConfig>()).collect::<Result<Vec<_>, _>>();
        disks.and_then(|disks| DiskPlan::of(&disks, 4)).map_err(|error| error.to_string())
    }

    fn refusal(disks: &[&str]) -> String {
        plan(disks).unwrap_err()
    }

    #[test]
    fn what_is_left_out_is_as_cloud_hypervisor_has_it() {
        let expected = DiskPlan {
            id: "_disk0".to_string(),
            pci_device_id: None,
            path: "/a".into(),
            read_only: false,
            direct: false,
            surely_raw: false,
            queues: 1,
            queue_size: 128,
            serial: None,
            limits: RateLimits::default(),
        };
        assert_eq!(plan(&["path=/a"]).unwrap(), [expected]);
        let plans =
            plan(&["path=/a,readonly=on,direct=on,num_queues=4,queue_size=2,serial=abc,image_type=raw"]).unwrap();
        let DiskPlan { read_only, direct, surely_raw, queues, queue_size, serial, .. } = &plans[0];
        assert!(*read_only && *direct && *surely_raw);
        assert_eq!((*queues, *queue_size, serial.as_deref()), (4, 2, Some("abc")));
    }

    #[test]
    fn disks_without_a_name_have_the_lowest_number_that_is_free() {
        let plans = plan(&["path=/a", "path=/b,id=_disk1", "path=/c", "path=/d,id=root"]).unwrap();
        assert_eq!(
            plans.iter().map(|plan| plan.id.as_str()).collect::<Vec<_>>(),
            ["_disk0", "_disk1", "_disk2", "root"]
        );
    }

    #[test]
    fn what_a_disk_cannot_have_is_refused_with_a_way_out() {
        for (disk, expected) in [
            ("readonly=on", "--disk: needs path=: a raw image in a file, or a block device"),
            ("path=/a,num_queues=0", "--disk num_queues=0: a disk needs a queue; give 1 or more"),
            (
                "path=/a,num_queues=5",
                "--disk num_queues=5: more than a VM with --cpus boot=4 can use; give at most 4, or more vCPUs",
            ),
            ("path=/a,queue_size=100", "--disk queue_size=100: not a power of two from 2 to 32768; 128 is usual"),
            (
                "path=/a,id=x,serial=123456789012345678901",
                "--disk id=x,serial=123456789012345678901: has 21 bytes, and a serial number has at most 20; shorten it",
            ),
            (
                "path=/a,pci_device_id=0",
                "--disk pci_device_id=0: bus 0 has slots 1 to 31 for devices; give one of them",
            ),
            (
                "path=/a,id=__x",
                "--disk id=__x: not a name for a device; two underscores at the start are kept for the VM's own",
            ),
            ("path=/a,iommu=on", "--disk iommu=on: virtual IOMMUs are not in this version yet; leave iommu out"),
            (
                "path=/a,pci_segment=1",
                "--disk pci_segment=1: further PCI segments are not in this version yet; leave pci_segment out",
            ),
            (
                "path=/a,rate_limit_group=x",
                "--disk rate_limit_group=x: groups of rate limits are not in this version yet; \
                 leave rate_limit_group out",
            ),
            (
                "path=/a,id=x,ops_size=0,ops_refill_time=1",
                "--disk id=x,ops_size=0: lets nothing through; give 1 or more, or 0 for ops_refill_time too",
            ),
            (
                "path=/a,image_type=qcow2",
                "--disk image_type=qcow2: images that are not raw are not in this version yet; \
                 convert it: qemu-img convert -O raw",
            ),
        ] {
            assert_eq!(refusal(&[disk]), expected);
        }
        let limited = r#"{"path": "/a", "rate_limiter_config": {"ops": {"size": 1, "refill_time": 1}}}"#;
        let limited = [serde_json::from_str(limited).unwrap()];
        let RateLimits { bandwidth, ops } = DiskPlan::of(&limited, 1).unwrap()[0].limits;
        assert_eq!((bandwidth, ops.unwrap().size), (None, 1));
    }

    #[test]
    fn disks_have_nothing_in_common_but_what_is_only_read() {
        assert_eq!(
            refusal(&["path=/a,id=x", "path=/b,id=x"]),
            "--disk id=x: this id is in use by another disk already; give each disk its own"
        );
        assert_eq!(
            refusal(&["path=/a,pci_device_id=3", "path=/b,pci_device_id=3"]),
            "--disk number 2, pci_device_id=3: slot 3 is in use by _disk0 already; give another, or leave pci_device_id out"
        );
        for (first, second) in [("", ""), (",readonly=on", ""), ("", ",readonly=on")] {
            assert_eq!(
                refusal(&[&format!("path=/a{first}"), &format!("path=/a{second}")]),
                "--disk number 2, path=/a: this image is in use by _disk0 already; \
                 give each its own, or add readonly=on to both"
            );
        }
        assert!(plan(&["path=/a,readonly=on", "path=/a,readonly=on"]).is_ok());
    }

    #[test]
    fn json_names_formats_as_cloud_hypervisor_does() {
        let disk: DiskConfig = serde_json::from_str(r#"{"path": "/a", "image_type": "Raw"}"#).unwrap();
        assert_eq!(disk, "path=/a,image_type=raw".parse().unwrap());
        assert_eq!(disk.to_string().parse::<DiskConfig>().unwrap(), disk);
    }
}
