//! Output of consoles that nothing has read yet.

use serde::{Deserialize, Serialize};
use virtio_devices::HexBytes;

/// Output of one console: as much as is kept of it.
pub type Output = HexBytes<{ 1 << 20 }>;

/// Unread output of each console.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ConsolesState {
    /// The serial port.
    pub serial: Output,
    /// The virtio console.
    pub console: Output,
    /// The debug console.
    pub debug: Output,
}

impl ConsolesState {
    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
