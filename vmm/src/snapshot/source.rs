//! Reading a snapshot, and checking it as far as possible without creating a VM.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use virtio_devices::{GuestMap, GuestRegion};
use vm_api::typed;
use vm_memory::GuestMemoryBackend as _;

use super::error::SnapshotError;
use super::folder::{CONFIG, MEMORY, STATE, path_of};
use super::state_file::SavedState;
use crate::config::VmConfig;
use crate::lazy_memory::image_layout::{has_named_file, range};
use crate::lazy_memory::memory_image;
use crate::machine_state::MachineState;
use crate::vm::memory::Image;

/// Limit on `config.json` and `state.json`, in bytes: far more than a VM with all VFs needs.
const LONGEST: u64 = 64 << 20;

/// A snapshot to restore.
pub(crate) struct Source {
    folder: PathBuf,
    /// Saved configuration, which a user may have edited.
    pub config: VmConfig,
    /// Contents of `state.json`.
    pub state: SavedState,
    /// State of the machine, from `state`.
    pub machine: MachineState,
    /// Guest memory outside named files of memory zones; `None` if these have all of it.
    pub memory: Option<Arc<File>>,
}

impl Source {
    /// Opens the snapshot at `url`.
    ///
    /// # Errors
    ///
    /// Fails if there is none, or it is incomplete or damaged.
    pub(crate) fn open(url: &str) -> Result<Self, SnapshotError> {
        let folder = path_of("source_url", url)?;
        let path = folder.join(STATE);
        let state = SavedState::from_file(&read_state(&path, &folder)?)
            .map_err(|what| SnapshotError::Damaged { path, what })?;
        let path = folder.join(CONFIG);
        let config = VmConfig::from_json(&read(&path)?)
            .map_err(|error| SnapshotError::Damaged { path, what: error.to_string() })?;
        let machine = typed::typed::<MachineState>(state.machine.clone()).map_err(|error| SnapshotError::Damaged {
            path: folder.join(STATE),
            what: format!("state.machine.{}: {}", error.path(), error.inner()),
        })?;
        let path = folder.join(MEMORY);
        // Offsets follow from the addresses alone.
        if !state.memory.is_of_some(&machine.layout.regions) {
            let what = "its memory is not that of its machine; copy it again".to_string();
            return Err(SnapshotError::Damaged { path: folder.join(STATE), what });
        }
        if state.memory.regions.is_empty() {
            return Ok(Self { folder, config, state, machine, memory: None });
        }
        let memory = open(&path).map_err(|error| SnapshotError::Read { path: path.clone(), error })?;
        memory_image::check(&memory, &state.memory, &state.id.0)
            .map_err(|what| SnapshotError::Damaged { path, what })?;
        Ok(Self { folder, config, state, machine, memory: Some(Arc::new(memory)) })
    }

    /// Folder of the snapshot.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the memory file with its layout.
    pub(crate) fn image(&self) -> Option<Image> {
        let memory = self.memory.as_ref()?;
        Some(Image::Snapshot(Arc::clone(memory), self.state.memory.clone()))
    }

    /// Checks that named files back all regions of `memory` that the snapshot leaves to them.
    ///
    /// # Errors
    ///
    /// Fails if one does not.
    pub(crate) fn check_elsewhere(&self, memory: &GuestMap) -> Result<(), SnapshotError> {
        let is_missing =
            |region: &&GuestRegion| self.state.memory.offset(&range(region)).is_none() && !has_named_file(region);
        let Some(region) = memory.iter().find(is_missing) else { return Ok(()) };
        let what = format!(
            "memory.zones: the snapshot leaves the memory from {:#x} on to a zone's file; give that zone the file that \
             it had (file)",
            range(region).start
        );
        Err(SnapshotError::Unsuitable(what))
    }

    /// Checks that the memory file is still the opened one, complete and of this snapshot.
    ///
    /// # Errors
    ///
    /// Fails if it is not.
    pub(crate) fn check_unchanged(&self) -> Result<(), SnapshotError> {
        let (Some(memory), path) = (&self.memory, self.folder.join(MEMORY)) else { return Ok(()) };
        let look = |found: io::Result<std::fs::Metadata>| {
            let found = found.map_err(|error| SnapshotError::Read { path: path.clone(), error })?;
            Ok::<_, SnapshotError>((found.dev(), found.ino(), found.len()))
        };
        let (now, opened) = (look(std::fs::metadata(&path))?, look(memory.metadata())?);
        if now == opened {
            return memory_image::check(memory, &self.state.memory, &self.state.id.0)
                .map_err(|what| SnapshotError::Damaged { path, what });
        }
        let what =
            "it was replaced or changed while the VM was restored; leave it alone, and restore again".to_string();
        Err(SnapshotError::Damaged { path, what })
    }
}

/// Opens a file of any type. O_NONBLOCK keeps a pipe from blocking the open; it has no effect on regular files.
fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Reads the file that marks the snapshot in `folder` as complete.
fn read_state(path: &Path, folder: &Path) -> Result<Vec<u8>, SnapshotError> {
    read(path).map_err(|error| match error {
        SnapshotError::Read { error, .. } if error.kind() == io::ErrorKind::NotFound => {
            SnapshotError::Absent(folder.to_owned())
        }
        error => error,
    })
}

/// Reads a file of any type. Its true length bounds the allocation.
fn read(path: &Path) -> Result<Vec<u8>, SnapshotError> {
    let failed = |error| SnapshotError::Read { path: path.to_path_buf(), error };
    let file = open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    let damaged = |what: &str| SnapshotError::Damaged { path: path.to_path_buf(), what: what.to_string() };
    if !found.is_file() {
        return Err(damaged("not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(LONGEST + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > LONGEST { Err(damaged("too long for a snapshot of a VM")) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestAddress;

    use super::*;
    use crate::lazy_memory::image_layout::ImageLayout;
    use crate::snapshot::folder::NewSnapshot;
    use crate::snapshot::state_file::Id;
    use crate::snapshot::state_file::tests::state;

    /// A complete snapshot of a machine with 8 MiB of memory.
    fn saved(folder: &Path, id: u8) {
        let machine: serde_json::Value =
            serde_json::from_str(include_str!("../vm/saved/golden/machine_state-1.json")).unwrap();
        let memory = GuestMap::from_ranges(&[(GuestAddress(0), 8 << 20)]).unwrap();
        let layout = ImageLayout::of_memory(&memory).unwrap();
        let id = [id; 16];
        let mut snapshot = NewSnapshot::begin(folder, &id).unwrap();
        let file = snapshot.create(MEMORY).unwrap();
        memory_image::save(&memory, &layout, &file, &id, &|| false).unwrap();
        let state = SavedState { id: Id(id), memory: layout, machine, ..state() };
        for (name, bytes) in [(STATE, state.to_file().unwrap()), (CONFIG, br#"{"payload":{"kernel":"/k"}}"#.to_vec())] {
            io::Write::write_all(&mut snapshot.create(name).unwrap(), &bytes).unwrap();
        }
        snapshot.publish().unwrap();
    }

    fn open(folder: &Path) -> Source {
        Source::open(folder.to_str().unwrap()).unwrap()
    }

    #[test]
    fn pipe_in_place_of_a_snapshot_file_is_refused_at_once() {
        for name in [STATE, CONFIG, MEMORY] {
            let folder = tempfile::tempdir().unwrap();
            saved(folder.path(), 1);
            let path = folder.path().join(name);
            std::fs::remove_file(&path).unwrap();
            rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
            let (tell, told) = std::sync::mpsc::channel();
            let url = folder.path().to_str().unwrap().to_string();
            std::thread::spawn(move || tell.send(Source::open(&url).err().unwrap().to_string()));
            let said = told.recv_timeout(std::time::Duration::from_secs(20)).expect("it waits for a writer");
            assert!(said.starts_with(path.to_str().unwrap()) && said.contains("not a regular file"), "{said}");
        }
    }

    #[test]
    fn replaced_or_changed_memory_file_is_reported_in_one_line() {
        let folders = [1, 2].map(|id| {
            let folder = tempfile::tempdir().unwrap();
            saved(folder.path(), id);
            folder
        });
        let [folder, other] = folders.each_ref().map(tempfile::TempDir::path);
        let (memory, stranger) = (folder.join(MEMORY), other.join(MEMORY));
        let source = open(folder);
        source.check_unchanged().unwrap();
        let file = File::options().write(true).open(&memory).unwrap();
        let len = file.metadata().unwrap().len();
        let refused = |len| {
            file.set_len(len).unwrap();
            let said = source.check_unchanged().unwrap_err().to_string();
            assert!(said.starts_with(memory.to_str().unwrap()) && !said.contains('\n'), "{said}");
            said
        };
        assert!(refused(len - 4096).contains("cut short"));
        assert!(refused(len).contains("another snapshot"), "its end is zeros now");
        let source = open(other);
        std::fs::rename(&memory, &stranger).unwrap();
        let said = source.check_unchanged().unwrap_err().to_string();
        assert!(said.contains("replaced") && !said.contains('\n'), "{said}");
        std::fs::remove_file(&stranger).unwrap();
        assert!(matches!(source.check_unchanged(), Err(SnapshotError::Read { .. })));
    }
}
