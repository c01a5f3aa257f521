//! The host's side of a VF: its settings, over the channel.

use std::time::Duration;

use vfctl::Channel;
use vm_api::channel::{Set, VfState, Welcome};

use crate::error::Result;

/// Time until the channel is free, and for each answer. 64 runs at a time share it at 100 requests per second.
const LIMIT: Duration = Duration::from_secs(20);

/// The settings of VFs. One program has them at a time, so drop this soon.
pub trait Governor {
    /// Asks for the PFs.
    ///
    /// # Errors
    ///
    /// Errors of the channel.
    fn hello(&mut self) -> Result<Welcome>;

    /// Asks for the settings of a VF.
    ///
    /// # Errors
    ///
    /// Errors of the channel, and refusals.
    fn get(&mut self, vf: &str) -> Result<VfState>;

    /// Changes settings of a VF, all or none.
    ///
    /// # Errors
    ///
    /// As [`Governor::get`].
    fn set(&mut self, set: &Set) -> Result<VfState>;

    /// Returns a VF to the host's settings.
    ///
    /// # Errors
    ///
    /// As [`Governor::get`].
    fn reset(&mut self, vf: &str) -> Result<VfState>;
}

impl Governor for Channel {
    fn hello(&mut self) -> Result<Welcome> {
        Ok(Self::hello(self)?)
    }

    fn get(&mut self, vf: &str) -> Result<VfState> {
        Ok(Self::get(self, vf)?)
    }

    fn set(&mut self, set: &Set) -> Result<VfState> {
        Ok(Self::set(self, set)?)
    }

    fn reset(&mut self, vf: &str) -> Result<VfState> {
        Ok(Self::reset(self, vf)?)
    }
}

/// Opens the channel of this guest.
///
/// # Errors
///
/// Errors of the channel.
pub fn open() -> Result<Box<dyn Governor>> {
    Ok(Box::new(Channel::open(LIMIT)?))
}
