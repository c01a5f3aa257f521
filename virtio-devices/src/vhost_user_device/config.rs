//! The device configuration of a device over vhost-user: the fields that its driver reads, and its writes.
//!
//! A vCPU never waits for the backend here. It reads a copy, and its writes are queued until a thread that owns the
//! backend forwards them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, Ordering};

use log::warn;
use parking_lot::Mutex;
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_CONFIG_WCE;

use super::kind::VhostUserKind;
use crate::backend::MAX_CONFIG;
use crate::block;
use crate::device::config::{ConfigField, Rule, read};
use crate::transport::features::has;

/// The most queued writes.
const MAX_WRITES: usize = 64;
/// The length of a file system's tag (`virtio 1.4 §5.11.4`).
const TAG: usize = 36;
/// Offset of a disk's writable field: true if writes may stay in a cache (`virtio 1.4 §5.2.4`).
const WRITEBACK: usize = 32;
/// Offset of a disk's number of queues.
const NUM_QUEUES: usize = 34;

/// The fields of a file system (`virtio 1.4 §5.11.4`), without those of features that are not offered.
pub(crate) const FILE_SYSTEM: &[ConfigField] = &[
    ConfigField::new("tag", 0, TAG as u16, Rule::Same),
    ConfigField::new("num_request_queues", TAG as u16, 4, Rule::Same),
];
/// The configuration of a device whose fields the backend defines.
pub(crate) const OTHER: &[ConfigField] = &[ConfigField::new("configuration", 0, MAX_CONFIG as u16, Rule::Same)];

/// The fields of the configuration of a device of this kind.
pub(crate) fn fields(kind: &VhostUserKind) -> &'static [ConfigField] {
    match kind {
        VhostUserKind::FileSystem { .. } => FILE_SYSTEM,
        VhostUserKind::Disk => block::FIELDS,
        VhostUserKind::Other { .. } => OTHER,
    }
}

/// A write of the driver: its offset and its bytes.
pub(crate) type Write = (u32, Vec<u8>);

/// The device configuration.
#[derive(Debug)]
pub(crate) struct DeviceConfig {
    writable: Writable,
    /// A disk's number of queues: configured by the user, not by the backend.
    queues: Option<u16>,
    state: Mutex<State>,
    generation: AtomicU8,
}

/// Fields that the driver may write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Writable {
    Nothing,
    /// A disk's `writeback`.
    Writeback,
    /// All bytes that the backend accepts.
    All,
}

#[derive(Debug)]
struct State {
    bytes: Vec<u8>,
    writes: VecDeque<Write>,
    /// Value that a disk's driver wrote to `writeback` since the reset. A new backend must be given it.
    writeback: Option<u8>,
    /// Number of writes dropped because the queue was full.
    dropped: u64,
}

impl DeviceConfig {
    /// Creates the configuration of a device of this kind with this many queues, for a backend with `features` and
    /// `of_backend`.
    pub(crate) fn new(kind: &VhostUserKind, queues: u16, features: u64, of_backend: &[u8]) -> Self {
        let (writable, bytes) = match kind {
            VhostUserKind::FileSystem { tag } => (Writable::Nothing, of_file_system(tag, queues)),
            VhostUserKind::Disk if has(features, VIRTIO_BLK_F_CONFIG_WCE) => (Writable::Writeback, of_backend.to_vec()),
            VhostUserKind::Disk => (Writable::Nothing, of_backend.to_vec()),
            VhostUserKind::Other { .. } => (Writable::All, of_backend.to_vec()),
        };
        let state = State { bytes, writes: VecDeque::new(), writeback: None, dropped: 0 };
        let queues = (*kind == VhostUserKind::Disk).then_some(queues);
        let config = Self { writable, queues, state: Mutex::new(state), generation: AtomicU8::new(0) };
        config.take(of_backend);
        config
    }

    /// Reads at `offset`. Bytes beyond the end read 0.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        read(&self.state.lock().bytes, offset, data);
    }

    /// Writes at `offset` for the driver of the device `id`. Returns true if the write must be forwarded to the
    /// backend.
    pub(crate) fn write(&self, id: &str, offset: u64, data: &[u8]) -> bool {
        let Ok(offset) = usize::try_from(offset) else { return false };
        let is_writable = match self.writable {
            Writable::Nothing => false,
            Writable::Writeback => offset == WRITEBACK && data.len() == 1,
            Writable::All => true,
        };
        let mut state = self.state.lock();
        let Some(field) = state.bytes.get_mut(offset..offset.saturating_add(data.len())).filter(|_| is_writable) else {
            return false;
        };
        // Drivers read back their writes, before the backend may have them.
        field.copy_from_slice(data);
        if self.writable == Writable::Writeback {
            state.writeback = data.first().copied();
        }
        if state.writes.len() >= MAX_WRITES {
            state.dropped += 1;
            // Logged at powers of two, so that a driver cannot fill the log.
            if state.dropped.is_power_of_two() {
                let times = state.dropped;
                warn!("{id}: the backend does not take what the driver writes ({times} so far): it is dropped");
            }
            return false;
        }
        state.writes.push_back((u32::try_from(offset).unwrap_or(u32::MAX), data.to_vec()));
        true
    }

    /// True if a write waits for the backend.
    pub(crate) fn has_written(&self) -> bool {
        !self.state.lock().writes.is_empty()
    }

    /// The oldest queued write. It stays queued until [`Self::written`].
    pub(crate) fn next_write(&self) -> Option<Write> {
        self.state.lock().writes.front().cloned()
    }

    /// Removes `write` from the queue after the backend has accepted it.
    pub(crate) fn written(&self, write: &Write) {
        let mut state = self.state.lock();
        // A reset may have dropped it in the meantime.
        if state.writes.front() == Some(write) {
            state.writes.pop_front();
        }
    }

    /// Updates the copy with the backend's configuration. Returns true if drivers read other values than before.
    pub(crate) fn take(&self, of_backend: &[u8]) -> bool {
        // The backend of a file system has none, and neither has a lost one.
        if of_backend.is_empty() {
            return false;
        }
        let mut state = self.state.lock();
        // Writes that the backend does not have yet must not be overwritten.
        if !state.writes.is_empty() {
            return false;
        }
        let mut bytes = of_backend.to_vec();
        if let (Some(queues), Some(field)) = (self.queues, bytes.get_mut(NUM_QUEUES..NUM_QUEUES + 2)) {
            field.copy_from_slice(&queues.to_le_bytes());
        }
        if let (Some(chosen), Some(field)) = (state.writeback, bytes.get_mut(WRITEBACK))
            && *field != chosen
        {
            *field = chosen;
            state.writes.push_back((WRITEBACK as u32, vec![chosen]));
        }
        let changed = state.bytes != bytes;
        if changed {
            state.bytes = bytes;
            self.changed();
        }
        changed
    }

    /// Makes the driver read the configuration again.
    pub(crate) fn changed(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Generation (`virtio 1.4 §2.5.1`).
    pub(crate) fn generation(&self) -> u8 {
        self.generation.load(Ordering::Acquire)
    }

    /// Value that a disk's driver wrote to `writeback` since the reset.
    pub(crate) fn writeback(&self) -> Option<u8> {
        self.state.lock().writeback
    }

    /// Queues the saved `writeback` value `byte` of the disk `id` for the backend. Returns false if the backend cannot
    /// have it.
    #[must_use]
    pub(crate) fn restore_writeback(&self, id: &str, byte: u8) -> bool {
        let is_writable = self.writable == Writable::Writeback;
        is_writable && self.write(id, WRITEBACK as u64, &[byte])
    }

    /// Drops the driver's writes at a reset.
    pub(crate) fn reset(&self) {
        let mut state = self.state.lock();
        state.writes.clear();
        state.writeback = None;
    }
}

/// `struct virtio_fs_config` (`virtio 1.4 §5.11.4`): the tag, and the number of request queues.
fn of_file_system(tag: &str, queues: u16) -> Vec<u8> {
    let mut bytes = vec![0; TAG];
    bytes.iter_mut().zip(tag.bytes()).for_each(|(to, from)| *to = from);
    bytes.extend(u32::from(queues.saturating_sub(1)).to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_drivers_writeback_choice_is_restored_to_the_backend() {
        let config = |features| DeviceConfig::new(&VhostUserKind::Disk, 1, features, &[0; 60]);
        let with = 1 << VIRTIO_BLK_F_CONFIG_WCE;
        let before = config(with);
        assert_eq!(before.writeback(), None);
        assert!(before.write("disk", WRITEBACK as u64, &[1]));
        let after = config(with);
        assert!(after.restore_writeback("disk", before.writeback().unwrap()));
        assert_eq!((after.writeback(), after.next_write()), (Some(1), Some((WRITEBACK as u32, vec![1]))));
        let mut field = [0];
        after.read(WRITEBACK as u64, &mut field);
        assert_eq!(field, [1]);
        // A backend without the field refuses the value.
        assert!(!config(0).restore_writeback("disk", 1));
    }
}
