//! A device that a client adds to a VM.

use std::os::fd::{AsRawFd, OwnedFd};

use vm_api::config::kinds::{AnyDevice, Texts};
use vm_api::config::{ConfigError, DeviceConfig, NetConfig, VmConfig};

/// A device that a client adds, and the descriptors from its request.
#[derive(Debug)]
pub enum NewDevice {
    /// A NIC, with the descriptors of its tap, one for each queue pair. Their numbers are not in the configuration.
    Net(Box<NetConfig>, Vec<OwnedFd>),
    /// A host device, with its descriptor, whose number is in the configuration.
    Host(Box<DeviceConfig>, Vec<OwnedFd>),
    /// A device of another kind. None of these has descriptors.
    Other(Box<dyn AnyDevice>),
}

impl NewDevice {
    fn any(&self) -> &dyn AnyDevice {
        match self {
            Self::Net(net, _) => &**net,
            Self::Host(device, _) => &**device,
            Self::Other(device) => &**device,
        }
    }

    /// Names and texts of its kind.
    pub fn texts(&self) -> &'static Texts {
        self.any().texts()
    }

    /// The id, if one is given.
    pub fn id(&self) -> Option<&str> {
        self.any().given_id()
    }

    /// Adds it to `config`, as the last of its kind.
    ///
    /// # Errors
    ///
    /// Fails without a change if the VM can have only one such device, and has it.
    pub fn push(&self, config: &mut VmConfig) -> Result<(), ConfigError> {
        self.any().add_to(config)?;
        if let (Self::Net(_, fds), Some(net)) = (self, config.net.last_mut()) {
            net.backend.fds = fds.iter().map(AsRawFd::as_raw_fd).collect();
        }
        Ok(())
    }

    /// The descriptors, which stay open as long as the VM has the device.
    pub fn into_fds(self) -> Vec<OwnedFd> {
        match self {
            Self::Net(_, fds) | Self::Host(_, fds) => fds,
            Self::Other(_) => Vec::new(),
        }
    }
}
