//! Memory image and `state.json` in single steps, for fuzz targets.

use std::fs::File;
use std::io;

use serde_json::{Value, json};
use virtio_devices::GuestMap;

use super::state_file::{self, Id, SavedState};
use crate::lazy_memory::image_layout::ImageLayout;
use crate::lazy_memory::memory_image::{self, SnapshotId};

/// Image file of given memory regions.
#[derive(Debug)]
pub struct ImageSteps(ImageLayout);

impl ImageSteps {
    /// Creates the layout of a saved machine's regions: first address and length. Returns `None` if it is refused.
    pub fn of(regions: &[(u64, u64)]) -> Option<Self> {
        ImageLayout::of_saved(regions).map(Self)
    }

    /// Offsets of the regions in the file, in bytes.
    pub fn offsets(&self) -> Vec<u64> {
        self.0.regions.iter().map(|region| region.offset).collect()
    }

    /// Length of the file in bytes.
    pub fn size(&self) -> u64 {
        self.0.file_size
    }

    /// Writes `memory`, which has these regions, to the empty `file`. Returns the size of the nonzero pages.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written.
    pub fn save(&self, memory: &GuestMap, file: &File, id: &SnapshotId) -> io::Result<u64> {
        memory_image::save(memory, &self.0, file, id, &|| false)
    }

    /// Checks that `file` is the memory of snapshot `id`, the first step of a restore.
    ///
    /// # Errors
    ///
    /// Fails with the fault of the file.
    pub fn check(&self, file: &File, id: &SnapshotId) -> Result<(), String> {
        memory_image::check(file, &self.0, id)
    }

    /// Reads `file` into `memory`, which has these regions and is zero.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read, or was truncated.
    pub fn load(&self, file: &File, memory: &GuestMap) -> io::Result<u64> {
        memory_image::load(file, &self.0, memory, &|| false)
    }

    /// Returns a state with this memory, for [`StateSteps::file`].
    ///
    /// # Panics
    ///
    /// Never: it is JSON.
    #[expect(clippy::expect_used, reason = "a state without numbers that JSON lacks is JSON")]
    pub fn state(&self, id: SnapshotId) -> Value {
        let state = SavedState {
            id: Id(id),
            program: "test".to_string(),
            memory: self.0.clone(),
            descriptors: Vec::new(),
            links: Vec::new(),
            machine: json!({}),
        };
        serde_json::to_value(state).expect("it is JSON")
    }
}

/// Content of a `state.json`.
#[derive(Debug)]
pub struct StateSteps(SavedState);

impl StateSteps {
    /// Returns the file of an edited state, with a correct checksum.
    pub fn file(state: Value) -> Vec<u8> {
        state_file::document(state).to_string().into_bytes()
    }

    /// Parses the bytes of a file.
    ///
    /// # Errors
    ///
    /// Fails with the fault of the document.
    pub fn read(bytes: &[u8]) -> Result<Self, String> {
        SavedState::from_file(bytes).map(Self)
    }

    /// Serializes the state again.
    ///
    /// # Panics
    ///
    /// Never: it was JSON.
    #[expect(clippy::expect_used, reason = "it was JSON")]
    pub fn write(&self) -> Vec<u8> {
        self.0.to_file().expect("it was JSON")
    }

    /// True if the state has the memory layout of `image`.
    pub fn is_of(&self, image: &ImageSteps) -> bool {
        self.0.memory == image.0
    }
}
