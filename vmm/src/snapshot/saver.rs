//! Writing a snapshot, in a thread: the control thread does not wait for disks.

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;
use virtio_devices::Memory;
use vm_memory::{GuestAddressSpace as _, GuestMemoryBackend as _};

use super::error::SnapshotError;
use super::folder::{CONFIG, MEMORY, NewSnapshot, STATE};
use super::overrides;
use super::state_file::{Id, SavedDescriptors, SavedLink, SavedState};
use crate::config::VmConfig;
use crate::error_kind::ErrorKind;
use crate::lazy_memory::discarded::Discarded;
use crate::lazy_memory::image_layout::ImageLayout;
use crate::lazy_memory::memory_image::{self, SnapshotId};
use crate::lazy_memory::page_faults::Progress;

/// Contents of a paused VM's snapshot.
pub(crate) struct Saver {
    /// Destination folder.
    pub folder: PathBuf,
    /// Current configuration.
    pub config: VmConfig,
    /// Functions that await tap descriptors.
    pub awaiting: Vec<SavedDescriptors>,
    /// VF links that clients have set.
    pub links: Vec<SavedLink>,
    /// State of the machine.
    pub machine: Value,
    /// Memory of the paused guest.
    pub memory: Memory,
    /// Progress of loading, if the memory is still being loaded from an earlier snapshot.
    pub filling: Option<Arc<Progress>>,
    /// Persistent memory that is not saved, and must be unwritten.
    pub discarded: Discarded,
}

/// Sizes of a written snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Written {
    /// Size of the nonzero pages, in bytes.
    pub memory: u64,
    /// Length of `state.json`, in bytes.
    pub state: u64,
}

impl Saver {
    /// Writes the snapshot.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be written, or `stop` returns true. All its files are removed then.
    pub(crate) fn save(mut self, stop: &dyn Fn() -> bool) -> Result<Written, SnapshotError> {
        let host = |action| move |error| SnapshotError::Host { action, error };
        self.discarded.check().map_err(|why| SnapshotError::Machine(why, ErrorKind::Conflict))?;
        let id = new_id().map_err(host("choose a number for the snapshot"))?;
        let memory = self.memory.memory();
        let layout = ImageLayout::of_memory(&memory).ok_or(SnapshotError::TooLarge)?;
        if layout.regions.len() < memory.num_regions() {
            log::warn!(
                "the snapshot has no copy of memory that named files keep (--memory-zone file=); keep these as they are"
            );
        }
        let mut snapshot = NewSnapshot::begin(&self.folder, &id)?;
        let state = SavedState {
            id: Id(id),
            program: concat!("cloud-hypervisor-sriov ", env!("CARGO_PKG_VERSION")).to_string(),
            memory: layout,
            descriptors: [overrides::take_descriptors(&mut self.config), self.awaiting].concat(),
            links: self.links,
            machine: self.machine,
        };
        let failed = |error: serde_json::Error| SnapshotError::Host { action: "write JSON", error: error.into() };
        let mut config = serde_json::to_vec_pretty(&self.config).map_err(failed)?;
        config.push(b'\n');
        write(&mut snapshot, CONFIG, &config)?;
        if let Some(filling) = &self.filling
            && !filling.wait(stop)
        {
            let lost = || io::Error::other("the guest's memory cannot be read from the snapshot that it came from");
            return Err(if stop() { SnapshotError::Abandoned } else { snapshot.write_error(MEMORY, lost()) });
        }
        let written = if state.memory.regions.is_empty() {
            0
        } else {
            let file = snapshot.create(MEMORY)?;
            memory_image::save(&memory, &state.memory, &file, &id, stop)
                .and_then(|written| file.sync_all().map(|()| written))
                .map_err(|error| snapshot.write_error(MEMORY, error))?
        };
        memory_image::flush_elsewhere(&memory).map_err(host("flush the files of memory zones"))?;
        let state = state.to_file().map_err(failed)?;
        write(&mut snapshot, STATE, &state)?;
        if stop() {
            return Err(SnapshotError::Abandoned);
        }
        snapshot.publish()?;
        Ok(Written { memory: written, state: state.len() as u64 })
    }
}

/// Creates a file of `bytes` and flushes it.
fn write(snapshot: &mut NewSnapshot, name: &str, bytes: &[u8]) -> Result<(), SnapshotError> {
    let mut file = snapshot.create(name)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(|error| snapshot.write_error(name, error))
}

/// Returns a random id.
fn new_id() -> io::Result<SnapshotId> {
    let mut id = [0; 16];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
    Ok(id)
}
