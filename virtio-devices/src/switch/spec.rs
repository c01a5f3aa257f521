//! The parameters of a switch, and the errors of creating one.

use std::num::NonZeroU32;

use thiserror::Error;

use super::mode::SwitchMode;
use crate::ErrorKind;
use crate::backend::Tap;

/// The most ports of a switch without its uplink: a PF and all VFs that it can have.
pub const MAX_PORTS: u16 = 4096;
/// The most workers of a switch.
pub const MAX_WORKERS: u16 = 64;

/// The parameters of a switch.
#[derive(Debug)]
pub struct SwitchSpec {
    /// The id of its PF, which its threads are named after.
    pub id: String,
    /// The forwarding mode.
    pub mode: SwitchMode,
    /// The number of its ports without the uplink, 1 to [`MAX_PORTS`]: the PF and its VFs.
    pub ports: u16,
    /// The most threads that carry its frames, 1 to [`MAX_WORKERS`]. They are started with the first driver.
    pub workers: u16,
    /// The tap that connects it to others; `None` for a closed switch. It has one queue.
    pub uplink: Option<Tap>,
    /// The limit of all ports' traffic to the uplink together, in Mbit/s (10^6 bits); frames beyond it wait in their
    /// queues. Competing ports get their [guarantees](super::PortSettings::min_tx_rate), and share the rest by their
    /// weights.
    pub uplink_rate: Option<NonZeroU32>,
}

/// The reason why a switch cannot be created: one line, to follow the option's name.
#[derive(Debug, Error)]
pub enum SwitchError {
    /// The number of ports is out of range.
    #[error("a switch of {0} ports: must be 1 to {MAX_PORTS}")]
    Ports(u16),
    /// The number of workers is out of range.
    #[error("workers={0}: must be 1 to {MAX_WORKERS}")]
    Workers(u16),
    /// The uplink is a tap with several queues.
    #[error("{name} has {queues} queues; an uplink has one")]
    UplinkQueues {
        /// The tap.
        name: String,
        /// The number of its queues.
        queues: usize,
    },
    /// The host has no descriptor for it.
    #[error("no descriptors for a switch: {0}")]
    Host(std::io::Error),
}

impl SwitchError {
    /// The party that has to act on the error.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Ports(_) | Self::Workers(_) => ErrorKind::Invalid,
            Self::UplinkQueues { .. } | Self::Host(_) => ErrorKind::Unsuitable,
        }
    }
}
