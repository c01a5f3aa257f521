//! Unread console output.

use serde::{Deserialize, Serialize};
use virtio_devices::HexBytes;

/// Unread output of one console, up to the buffer's size.
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
    /// True if no console has unread output.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
