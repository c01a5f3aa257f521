//! The kinds of devices that a client can add to a VM: one table for the command line, server and client of the API.

use std::fmt::Debug;
use std::mem::take;
use std::str::FromStr;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::config::VmConfig;
use crate::config::device::DeviceConfig;
use crate::config::disk::DiskConfig;
use crate::config::error::{ConfigError, Problem};
use crate::config::id;
use crate::config::net::NetConfig;
use crate::config::option::{Options, help};
use crate::config::unsupported::Object;
use crate::config::vdpa::VdpaConfig;
use crate::config::virtio::fs::FsConfig;
use crate::config::virtio::generic_vhost_user::GenericVhostUserConfig;
use crate::config::virtio::pmem::PmemConfig;
use crate::config::virtio::vsock::VsockConfig;
use crate::typed::typed;

/// All kinds, in the order in which devices without an id are numbered.
pub static KINDS: [Kind; 8] = [
    Kind::of::<DiskConfig>(),
    Kind::of::<NetConfig>(),
    Kind::of::<FsConfig>(),
    Kind::of::<GenericVhostUserConfig>(),
    Kind::of::<PmemConfig>(),
    Kind::of::<VsockConfig>(),
    Kind::of::<VdpaConfig>(),
    Kind::of::<DeviceConfig>(),
];

/// Names and texts of a kind of devices.
#[derive(Debug)]
pub struct Texts {
    /// Path of the endpoint that adds one: `/api/v1/vm.add-pmem`.
    pub path: &'static str,
    /// The field of a VM's configuration: `pmem`.
    pub field: &'static str,
    /// Prefix of ids that are chosen: `_pmem`.
    pub prefix: &'static str,
    /// Noun for a device in messages.
    pub noun: &'static str,
    /// Short help of the option.
    pub brief: &'static str,
    /// First sentence of the option's long help, without a full stop.
    pub about: &'static str,
    /// Help of the command.
    pub command: &'static str,
    /// Name of the command's argument, which shells show.
    pub argument: &'static str,
    /// Help of the argument.
    pub argument_help: &'static str,
}

impl Texts {
    /// Name of the endpoint: `vm.add-pmem`.
    pub fn endpoint(&self) -> &'static str {
        self.path.rsplit('/').next().unwrap_or(self.path)
    }

    /// Name of the command of `ch-remote`: `add-pmem`.
    pub fn command_name(&self) -> &'static str {
        self.endpoint().trim_start_matches("vm.")
    }
}

/// The configuration of a device that a client can add.
pub trait Addable:
    Options + FromStr<Err = ConfigError> + DeserializeOwned + Serialize + Clone + Debug + Send + 'static
{
    /// Names and texts.
    const TEXTS: Texts;
    /// Further long help of the command's argument.
    const MORE: &'static str = "";
    /// True if a request has its descriptors.
    const HAS_FDS: bool = false;
    /// True if a VM can have only one.
    const IS_SINGLE: bool = false;
    /// The object with its unsupported fields.
    const OBJECT: Object = Object::Whole;

    /// The devices of this kind in `config`.
    fn all(config: &VmConfig) -> &[Self];

    /// The id, if one is given.
    fn id(&self) -> Option<&str>;

    /// Adds it to `config`, as the last of its kind.
    ///
    /// # Errors
    ///
    /// Fails without a change if a VM can have only one, and this has it.
    fn push(self, config: &mut VmConfig) -> Result<(), ConfigError>;

    /// Takes out the numbers of its descriptors, which are sent with the call and not named in its body.
    fn take_fds(&mut self) -> Vec<i32> {
        Vec::new()
    }
}

/// A device to add, of any kind.
pub trait AnyDevice: Debug + Send {
    /// Names and texts of its kind.
    fn texts(&self) -> &'static Texts;

    /// The id, if one is given.
    fn given_id(&self) -> Option<&str>;

    /// Adds a copy to `config`, as the last of its kind.
    ///
    /// # Errors
    ///
    /// As [`Addable::push`].
    fn add_to(&self, config: &mut VmConfig) -> Result<(), ConfigError>;
}

impl<D: Addable> AnyDevice for D {
    fn texts(&self) -> &'static Texts {
        const { &D::TEXTS }
    }

    fn given_id(&self) -> Option<&str> {
        self.id()
    }

    fn add_to(&self, config: &mut VmConfig) -> Result<(), ConfigError> {
        self.clone().push(config)
    }
}

/// Error of a JSON object that is no device, with the path of the mistake.
pub type JsonError = serde_path_to_error::Error<serde_json::Error>;

/// The JSON of a device, and the numbers of its descriptors.
pub type Described = (String, Vec<i32>);

/// A kind of devices: what its [`Addable`] says, and functions for each device.
#[derive(Debug)]
pub struct Kind {
    /// The option: `--pmem`.
    pub option: &'static str,
    /// Names and texts.
    pub texts: Texts,
    /// Further long help of the command's argument.
    pub more: &'static str,
    /// True if a request has descriptors of a device.
    pub has_fds: bool,
    /// True if a VM can have only one.
    pub is_single: bool,
    /// The object with the unsupported fields.
    pub object: Object,
    /// Help of all keys.
    pub keys: fn() -> String,
    /// Adds the device that a value of the option describes.
    pub add: fn(&mut VmConfig, &str) -> Result<(), ConfigError>,
    /// The JSON of the device that a value of the option describes, and the numbers of its descriptors.
    pub to_json: fn(&str) -> Result<Described, ConfigError>,
    /// The device that JSON describes.
    pub from_json: fn(Value) -> Result<Box<dyn AnyDevice>, JsonError>,
    ids: fn(&VmConfig) -> Vec<Option<&str>>,
}

impl Kind {
    const fn of<D: Addable>() -> Self {
        Self {
            option: D::OPTION,
            texts: D::TEXTS,
            more: D::MORE,
            has_fds: D::HAS_FDS,
            is_single: D::IS_SINGLE,
            object: D::OBJECT,
            keys: help::<D>,
            add: |config, text| text.parse::<D>()?.push(config),
            to_json: |text| {
                let mut device: D = text.parse()?;
                let fds = device.take_fds();
                let json = serde_json::to_string(&device);
                let json = json.map_err(|error| ConfigError::new(D::OPTION, Problem::Value(error.to_string())))?;
                Ok((json, fds))
            },
            from_json: |json| Ok(Box::new(typed::<D>(json)?)),
            ids: |config| D::all(config).iter().map(D::id).collect(),
        }
    }
}

/// The ids of a VM's devices by kind, in the order of the configuration: the given ones, and for other devices the
/// prefix of the kind with a number that is unique among all devices, as in Cloud Hypervisor: `_disk0`, `_disk1`,
/// `_net2`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ids(Vec<Vec<String>>);

impl Ids {
    /// The ids of one kind.
    pub fn of<D: Addable>(&self) -> Vec<String> {
        let all = KINDS.iter().zip(&self.0).find(|(kind, _)| kind.option == D::OPTION);
        all.map(|(_, ids)| ids.clone()).unwrap_or_default()
    }

    /// The kinds of which a VM may have several: the option, the field of the configuration, and the ids.
    pub fn lists(self) -> impl Iterator<Item = (&'static str, &'static str, Vec<String>)> {
        let lists = KINDS.iter().zip(self.0).filter(|(kind, _)| !kind.is_single);
        lists.map(|(kind, ids)| (kind.option, kind.texts.field, ids))
    }
}

impl VmConfig {
    /// The ids of all devices with numbered ids, chosen if not given.
    pub fn ids(&self) -> Ids {
        Ids(id::choose(KINDS.iter().map(|kind| (kind.texts.prefix, (kind.ids)(self))).collect()))
    }
}

impl Addable for DiskConfig {
    const TEXTS: Texts = Texts {
        path: "/api/v1/vm.add-disk",
        field: "disks",
        prefix: "_disk",
        noun: "disk",
        brief: "Disks",
        about: "Disks",
        command: "Add a disk",
        argument: "disk",
        argument_help: "The disk",
    };
    const OBJECT: Object = Object::Disk;

    fn all(config: &VmConfig) -> &[Self] {
        &config.disks
    }

    fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    fn push(self, config: &mut VmConfig) -> Result<(), ConfigError> {
        config.disks.push(self);
        Ok(())
    }
}

impl Addable for NetConfig {
    const TEXTS: Texts = Texts {
        path: "/api/v1/vm.add-net",
        field: "net",
        prefix: "_net",
        noun: "NIC",
        brief: "NICs. One with sriov_vfs is an SR-IOV physical function (PF)",
        about: "NICs. One with sriov_vfs is an SR-IOV physical function (PF)",
        command: "Add a NIC with its VFs",
        argument: "net",
        argument_help: "The NIC",
    };
    const MORE: &'static str = ". Descriptors of fd= are sent to the VMM";
    const HAS_FDS: bool = true;
    const OBJECT: Object = Object::Net;

    fn all(config: &VmConfig) -> &[Self] {
        &config.net
    }

    fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    fn push(self, config: &mut VmConfig) -> Result<(), ConfigError> {
        config.net.push(self);
        Ok(())
    }

    fn take_fds(&mut self) -> Vec<i32> {
        take(&mut self.backend.fds)
    }
}

impl Addable for FsConfig {
    const TEXTS: Texts = Texts {
        path: "/api/v1/vm.add-fs",
        field: "fs",
        prefix: "_fs",
        noun: "file system",
        brief: "Shared file systems",
        about: "Folders of the host that the guest mounts, over a vhost-user backend such as virtiofsd",
        command: "Add a shared file system",
        argument: "fs",
        argument_help: "The file system",
    };

    fn all(config: &VmConfig) -> &[Self] {
        &config.fs
    }

    fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    fn push(self, config: &mut VmConfig) -> Result<(), ConfigError> {
        config.fs.push(self);
        Ok(())
    }
}

impl Addable for GenericVhostUserConfig {
    const TEXTS: Texts = Texts {
        path: "/api/v1/vm.add-generic-vhost-user",
        field: "generic_vhost_user",
        prefix: "_generic_vhost_user",
        noun: "device",
        brief: "vhost-user devices of any type",
        about: "vhost-user devices of any type",
        command: "Add a vhost-user device of any type",
        argument: "device",
        argument_help: "The device",
    };

    fn all(config: &VmConfig) -> &[Self] {
        &config.generic_vhost_user
    }

    fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    fn push(self, config: &mut VmConfig) -> Result<(), ConfigError> {
        config.generic_vhost_user.push(self);
        Ok(())
    }
}

impl Addable for PmemConfig {
    const TEXTS: Texts = Texts {
        path: "/api/v1/vm.add-pmem",
        field: "pmem",
        prefix: "_pmem",
        noun: "persistent memory",
        brief: "Persistent memory",
        about: "Files that the guest has as persistent memory",
        command: "Add persistent memory",
        argument: "pmem",
        argument_help: "The memory",
    };

    fn all(config: &VmConfig) -> &[Self] {
        &config.pmem
    }

    fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    fn push(self, config: &mut VmConfig) -> Result<(), ConfigError> {
        config.pmem.push(self);
        Ok(())
    }
}

impl Addable for VsockConfig {
    const TEXTS: Texts = Texts {
        path: "/api/v1/vm.add-vsock",
        field: "vsock",
        prefix: "_vsock",
        noun: "vsock device",
        brief: "Socket device: connections between programs of the guest and of the host",
        about: "Socket device: connections between programs of the guest and of the host",
        command: "Add a vsock device",
        argument: "vsock",
        argument_help: "The device",
    };
    const IS_SINGLE: bool = true;

    fn all(config: &VmConfig) -> &[Self] {
        config.vsock.as_slice()
    }

    fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    fn push(self, config: &mut VmConfig) -> Result<(), ConfigError> {
        if let Some(other) = &config.vsock {
            let what = "the place of the only socket device of a VM".to_string();
            let user = other.id.clone().unwrap_or_default();
            let remedy = "use that, or remove it first".to_string();
            return Err(ConfigError::new(Self::OPTION, Problem::InUse { what, user, remedy }));
        }
        config.vsock = Some(self);
        Ok(())
    }
}

impl Addable for VdpaConfig {
    const TEXTS: Texts = Texts {
        path: "/api/v1/vm.add-vdpa",
        field: "vdpa",
        prefix: "_vdpa",
        noun: "vDPA device",
        brief: "NICs that are vDPA devices of the host",
        about: "NICs that are vDPA devices of the host. --net with vdpa= has more keys",
        command: "Add a vDPA device",
        argument: "vdpa",
        argument_help: "The device",
    };

    fn all(config: &VmConfig) -> &[Self] {
        &config.vdpa
    }

    fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    fn push(self, config: &mut VmConfig) -> Result<(), ConfigError> {
        config.vdpa.push(self);
        Ok(())
    }
}

impl Addable for DeviceConfig {
    const TEXTS: Texts = Texts {
        path: "/api/v1/vm.add-device",
        field: "devices",
        prefix: "_vfio",
        noun: "device",
        brief: "Devices of the host",
        about: "PCI devices of the host, passed through to the guest (VFIO)",
        command: "Add a device of the host (VFIO)",
        argument: "device",
        argument_help: "The device",
    };
    const HAS_FDS: bool = true;
    const OBJECT: Object = Object::Device;

    fn all(config: &VmConfig) -> &[Self] {
        &config.devices
    }

    fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    fn push(self, config: &mut VmConfig) -> Result<(), ConfigError> {
        config.devices.push(self);
        Ok(())
    }

    fn take_fds(&mut self) -> Vec<i32> {
        self.fd.take().into_iter().collect()
    }
}
