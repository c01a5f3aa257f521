//! A NIC without a tap, for fuzz targets.

use std::os::fd::OwnedFd;

use crate::backend::Tap;
use crate::{Net, NetError, NetSpec};

/// A NIC whose frames are read from and written to `sockets`, one for each of its queue pairs.
///
/// # Errors
///
/// Fails if `spec` is no NIC's.
pub fn nic(spec: NetSpec, sockets: Vec<OwnedFd>) -> Result<Net, NetError> {
    Net::new(spec, Tap::over_sockets(sockets))
}
