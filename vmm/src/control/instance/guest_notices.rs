//! Notices to the guest about its VFs.

use serde::Serialize;
use virtio_devices::MAX_MESSAGE;
use vm_api::channel::Notice;

use super::Instance;
use crate::vm::Vm;

impl Instance {
    /// Tells the guest of a change, if a program of the guest has the port open for it. This waits for nothing: if too
    /// many notices wait, the oldest is dropped.
    pub(super) fn notify_guest(&self, notice: Notice) {
        if let Some(channel) = self.vm().and_then(Vm::channel)
            && let Some(line) = line(&notice)
        {
            channel.announce(line);
        }
    }
}

/// A message as a line; `None` if it is longer than the guest reads.
pub(super) fn line(message: &impl Serialize) -> Option<Vec<u8>> {
    let mut line = serde_json::to_vec(message).ok()?;
    line.push(b'\n');
    (line.len() <= MAX_MESSAGE).then_some(line)
}
