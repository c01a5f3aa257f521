//! The commands that add a device, and their calls.

use std::error::Error;
use std::marker::PhantomData;
use std::mem::take;
use std::os::fd::OwnedFd;
use std::str::FromStr;

use clap::{Args, Subcommand};
use serde::Serialize;
use vm_api::config::{
    ConfigError, DeviceConfig, DiskConfig, FsConfig, GenericVhostUserConfig, NetConfig, Options, PmemConfig, Problem,
    VdpaConfig, VfConfig, VsockConfig,
};

use super::descriptor::duplicate;
use crate::vm_options::keys;

/// Command that adds a device.
#[derive(Debug, Subcommand)]
pub(crate) enum Add {
    /// Add a device of the host (VFIO)
    #[command(name = "add-device")]
    Device(New<DeviceConfig>),
    /// Add a disk
    #[command(name = "add-disk")]
    Disk(New<DiskConfig>),
    /// Add a shared file system
    #[command(name = "add-fs")]
    Fs(New<FsConfig>),
    /// Add a vhost-user device of any type
    #[command(name = "add-generic-vhost-user")]
    GenericVhostUser(New<GenericVhostUserConfig>),
    /// Add a NIC with its VFs
    #[command(name = "add-net")]
    Net {
        #[command(flatten)]
        net: New<NetConfig>,
        /// Overrides of the PF's defaults for one VF. Repeat for more
        #[arg(
            long,
            value_name = "key=value,...",
            long_help = keys::<VfConfig>("Overrides of the PF's defaults for one VF. Repeat for more")
        )]
        vf: Vec<String>,
    },
    /// Add persistent memory
    #[command(name = "add-pmem")]
    Pmem(New<PmemConfig>),
    /// Add a vfio-user device (not supported yet)
    #[command(name = "add-user-device")]
    UserDevice(Unknown),
    /// Add a vDPA device
    #[command(name = "add-vdpa")]
    Vdpa(New<VdpaConfig>),
    /// Add a vsock device
    #[command(name = "add-vsock")]
    Vsock(New<VsockConfig>),
}

/// The description of a device, as in an option of the VMM.
#[derive(Debug, Args)]
pub(crate) struct New<D: Device> {
    #[arg(id = D::NAME, value_name = "key=value,...", help = D::NOUN, long_help = keys::<D>(&about::<D>()))]
    device: String,
    #[arg(skip)]
    parsed_into: PhantomData<D>,
}

/// The arguments of a command that is not supported yet.
#[derive(Debug, Args)]
pub(crate) struct Unknown {
    /// As for Cloud Hypervisor's ch-remote
    #[arg(value_name = "key=value,...")]
    pub config: String,
}

/// A device that can be added.
pub(crate) trait Device: Options + FromStr<Err = ConfigError> + Serialize + Send + Sync + 'static {
    /// Name of the argument, which shells show.
    const NAME: &'static str = "device";
    /// Noun for it in the help.
    const NOUN: &'static str;
    /// Further help.
    const MORE: &'static str = "";

    /// Takes the numbers of its descriptors, which are sent with the call and not named in its body.
    fn take_fds(&mut self) -> Vec<i32> {
        Vec::new()
    }
}

impl Device for DeviceConfig {
    const NOUN: &'static str = "The device";

    fn take_fds(&mut self) -> Vec<i32> {
        self.fd.take().into_iter().collect()
    }
}

impl Device for DiskConfig {
    const NAME: &'static str = "disk";
    const NOUN: &'static str = "The disk";
}

impl Device for FsConfig {
    const NAME: &'static str = "fs";
    const NOUN: &'static str = "The file system";
}

impl Device for GenericVhostUserConfig {
    const NOUN: &'static str = "The device";
}

impl Device for NetConfig {
    const NAME: &'static str = "net";
    const NOUN: &'static str = "The NIC";
    const MORE: &'static str = ". Descriptors of fd= are sent to the VMM";

    fn take_fds(&mut self) -> Vec<i32> {
        take(&mut self.backend.fds)
    }
}

impl Device for PmemConfig {
    const NAME: &'static str = "pmem";
    const NOUN: &'static str = "The memory";
}

impl Device for VdpaConfig {
    const NAME: &'static str = "vdpa";
    const NOUN: &'static str = "The device";
}

impl Device for VsockConfig {
    const NAME: &'static str = "vsock";
    const NOUN: &'static str = "The device";
}

/// The long help of a device, without its keys.
fn about<D: Device>() -> String {
    format!("{}, as for {} of cloud-hypervisor{}", D::NOUN, D::OPTION, D::MORE)
}

/// The body of a call, if it has one, and copies of the named descriptors.
pub(crate) type Content = (Option<String>, Vec<OwnedFd>);

impl Add {
    /// Name of the command's endpoint.
    pub(crate) const fn endpoint(&self) -> &'static str {
        match self {
            Self::Device(_) => "vm.add-device",
            Self::Disk(_) => "vm.add-disk",
            Self::Fs(_) => "vm.add-fs",
            Self::GenericVhostUser(_) => "vm.add-generic-vhost-user",
            Self::Net { .. } => "vm.add-net",
            Self::Pmem(_) => "vm.add-pmem",
            Self::UserDevice(_) => "vm.add-user-device",
            Self::Vdpa(_) => "vm.add-vdpa",
            Self::Vsock(_) => "vm.add-vsock",
        }
    }

    /// The content of the command's call. A device that is not supported has none, because the VMM always refuses it.
    ///
    /// # Errors
    ///
    /// Fails if the description is malformed, or a descriptor is not open.
    pub(crate) fn content(self) -> Result<Content, Box<dyn Error>> {
        match self {
            Self::Device(new) => new.content(),
            Self::Disk(new) => new.content(),
            Self::Fs(new) => new.content(),
            Self::GenericVhostUser(new) => new.content(),
            Self::Net { net, vf } => net.content_with(|net| {
                for vf in vf {
                    net.vfs.push(vf.parse().map_err(of_argument)?);
                }
                Ok(())
            }),
            Self::Pmem(new) => new.content(),
            Self::UserDevice(_) => Ok((None, Vec::new())),
            Self::Vdpa(new) => new.content(),
            Self::Vsock(new) => new.content(),
        }
    }
}

/// An error of `--vf`, which has the keys of the VMM's `--net-vf`.
fn of_argument(error: ConfigError) -> ConfigError {
    let named = |text: String| text.replace(VfConfig::OPTION, "--vf");
    let problem = match error.problem {
        Problem::Syntax(what) => Problem::Syntax(named(what)),
        problem => problem,
    };
    ConfigError { subject: named(error.subject), problem }
}

impl<D: Device> New<D> {
    fn content(self) -> Result<Content, Box<dyn Error>> {
        self.content_with(|_| Ok(()))
    }

    /// The content for the device with what `complete` adds to it.
    fn content_with(self, complete: impl FnOnce(&mut D) -> Result<(), ConfigError>) -> Result<Content, Box<dyn Error>> {
        let mut device: D = self.device.parse()?;
        let fds = device.take_fds().into_iter().map(duplicate).collect::<Result<_, _>>()?;
        complete(&mut device)?;
        Ok((Some(serde_json::to_string(&device)?), fds))
    }
}
