//! A snapshot that is written, by a thread of its own: the control thread waits for no disk.

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

/// Content of a snapshot of a paused VM.
pub(crate) struct Saver {
    /// The folder.
    pub folder: PathBuf,
    /// The configuration as it is now.
    pub config: VmConfig,
    /// The functions that await descriptors of taps.
    pub awaiting: Vec<SavedDescriptors>,
    /// The links of VFs that clients have set.
    pub links: Vec<SavedLink>,
    /// The machine.
    pub machine: Value,
    /// The guest's memory, which nobody writes to.
    pub memory: Memory,
    /// Progress of the filler, if its memory is still being filled.
    pub filling: Option<Arc<Progress>>,
    /// Persistent memory that is not saved, and must be as its file is.
    pub discarded: Discarded,
}

/// Sizes that were written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Written {
    /// The pages that are not zero, in bytes.
    pub memory: u64,
    /// The length of `state.json`, in bytes.
    pub state: u64,
}

impl Saver {
    /// Writes the snapshot.
    ///
    /// # Errors
    ///
    /// It cannot be written, or `stop` says that nobody wants it any more. Nothing is left of it then.
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

/// Makes a file of `bytes`, and has them on the disk.
fn write(snapshot: &mut NewSnapshot, name: &str, bytes: &[u8]) -> Result<(), SnapshotError> {
    let mut file = snapshot.create(name)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(|error| snapshot.write_error(name, error))
}

/// A number that no other snapshot has.
fn new_id() -> io::Result<SnapshotId> {
    let mut id = [0; 16];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
    Ok(id)
}
