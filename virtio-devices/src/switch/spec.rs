//! What a switch is, and why there cannot be one.

use std::num::NonZeroU32;

use thiserror::Error;

use super::mode::SwitchMode;
use crate::ErrorKind;
use crate::backend::Tap;

/// The most ports of a switch without its uplink: a PF and all VFs that it can have.
pub const MAX_PORTS: u16 = 4096;
/// The most workers of a switch.
pub const MAX_WORKERS: u16 = 64;

/// What a switch is.
#[derive(Debug)]
pub struct SwitchSpec {
    /// Its PF's id, which its threads are named after.
    pub id: String,
    /// How it forwards.
    pub mode: SwitchMode,
    /// The number of its ports without the uplink, 1 to [`MAX_PORTS`]: the PF and its VFs.
    pub ports: u16,
    /// The most threads that carry its frames, 1 to [`MAX_WORKERS`]. They are started with the first driver.
    pub workers: u16,
    /// What connects it to others; none for a closed switch. It has one queue.
    pub uplink: Option<Tap>,
    /// What its ports may send to the uplink together, in Mbit/s (10^6 bits); more waits in their queues. Ports that
    /// compete have what they are [guaranteed](super::PortSettings::min_tx_rate), and share the rest by their weights.
    pub uplink_rate: Option<NonZeroU32>,
}

/// Why there cannot be such a switch: one line, to follow the option's name.
#[derive(Debug, Error)]
pub enum SwitchError {
    /// The number of ports is none.
    #[error("a switch of {0} ports: must be 1 to {MAX_PORTS}")]
    Ports(u16),
    /// The number of workers is none.
    #[error("workers={0}: must be 1 to {MAX_WORKERS}")]
    Workers(u16),
    /// The uplink is a tap of several queues.
    #[error("{name} has {queues} queues; an uplink has one")]
    UplinkQueues {
        /// The tap.
        name: String,
        /// How many it has.
        queues: usize,
    },
    /// The uplink refuses.
    #[error("{name} as uplink: {source}")]
    Uplink {
        /// The tap.
        name: String,
        /// Why.
        source: std::io::Error,
    },
    /// The host has no descriptor for it.
    #[error("no descriptors for a switch: {0}")]
    Host(std::io::Error),
}

impl SwitchError {
    /// Who has to act on it.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Ports(_) | Self::Workers(_) => ErrorKind::Invalid,
            Self::UplinkQueues { .. } | Self::Uplink { .. } | Self::Host(_) => ErrorKind::Unsuitable,
        }
    }
}
