//! A program of this crate for a guest, on a disk.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::guest::{Guest, GuestSpec};

/// A disk with a program; removed on drop.
pub struct ProgramDisk {
    _folder: TempDir,
    disk: PathBuf,
}

impl ProgramDisk {
    /// A disk with the static program at `path`.
    pub fn of(path: &Path) -> ProgramDisk {
        let folder = tempfile::tempdir().expect("a folder for a disk");
        let disk = folder.path().join("program");
        let mut program = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        program.resize(program.len().next_multiple_of(4096), 0);
        fs::write(&disk, program).expect("there is room for a program");
        ProgramDisk { _folder: folder, disk }
    }

    /// Adds the disk to a guest, which must have the test modules.
    pub fn add_to(&self, spec: GuestSpec) -> GuestSpec {
        spec.disk(&format!("path={},readonly=on", self.disk.display()))
    }
}

impl Guest {
    /// Copies the program from the guest's only disk to `/tmp/<name>`.
    pub fn take_program(&mut self, name: &str) {
        self.take_program_from("vda", name);
    }

    /// Copies the program on `disk` of the guest, such as `vdb`, to `/tmp/<name>`.
    pub fn take_program_from(&mut self, disk: &str, name: &str) {
        if self.run("[ -e /dev/vda ]").status != 0 {
            self.load("virtio_blk");
        }
        self.ok(&format!("dd if=/dev/{disk} of=/tmp/{name} bs=64k 2> /dev/null && chmod +x /tmp/{name}"));
    }
}
