//! Files of a VM.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use tempfile::{TempDir, tempdir};

/// Files of a VM, in a directory that is readable for other users than root.
pub(crate) struct Files(TempDir);

impl Files {
    /// Creates an empty directory, for a test in its own namespaces: a VM has taps.
    pub(crate) fn new() -> Self {
        fixtures::namespace::enter();
        let files = tempdir().unwrap();
        fs::set_permissions(files.path(), Permissions::from_mode(0o755)).unwrap();
        Self(files)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> String {
        fs::write(self.path(name), bytes).unwrap();
        self.path(name).into_os_string().into_string().unwrap()
    }

    /// A file that takes no space on the disk.
    pub(crate) fn sparse(&self, name: &str, len: u64) -> String {
        let path = self.write(name, b"");
        File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
        path
    }

    /// A kernel that idles forever.
    pub(crate) fn idle_kernel(&self) -> String {
        self.kernel(&[0xf4, 0xeb, 0xfd]) // hlt; jmp to it
    }

    /// A kernel that causes a triple fault at once: there are no interrupt descriptors.
    pub(crate) fn faulting_kernel(&self) -> String {
        self.kernel(&[0x0f, 0x0b]) // ud2
    }

    /// A kernel that powers the machine off at once.
    pub(crate) fn off_kernel(&self) -> String {
        // mov dx, 0x600; mov al, 0x34; out dx, al; hlt: writes S5 to the sleep control register.
        self.kernel(&[0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xf4])
    }

    /// A kernel of these instructions.
    pub(crate) fn kernel(&self, code: &[u8]) -> String {
        self.write("vmlinux", &kernel(code))
    }
}

/// An ELF file with one loaded segment, which has this code at its PVH entry.
pub(crate) fn kernel(code: &[u8]) -> Vec<u8> {
    const ENTRY: u32 = 0x10_0000;
    const HEADERS: u64 = 64 + 2 * 56;
    let mut note = Vec::new();
    // Owner "Xen", type 18 (XEN_ELFNOTE_PHYS32_ENTRY): the address of the entry.
    for word in [4u32, 4, 18, u32::from_le_bytes(*b"Xen\0"), ENTRY] {
        note.extend(word.to_le_bytes());
    }
    let segment = |kind: u32, offset: u64, address: u64, len: u64| {
        let mut header = [kind.to_le_bytes(), 5u32.to_le_bytes()].concat();
        for field in [offset, address, address, len, len, 4] {
            header.extend(field.to_le_bytes());
        }
        header
    };
    // 64-bit, little-endian; an executable for x86-64.
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    for field in [ENTRY.into(), 64, 0u64] {
        file.extend(field.to_le_bytes());
    }
    // No flags; sizes of this header and of the 2 program headers; no sections.
    for field in [0u16, 0, 64, 56, 2, 64, 0, 0] {
        file.extend(field.to_le_bytes());
    }
    let (code_at, code_len) = (HEADERS + note.len() as u64, code.len() as u64);
    file.extend(segment(4, HEADERS, 0, note.len() as u64));
    file.extend(segment(1, code_at, ENTRY.into(), code_len));
    file.extend(note);
    file.extend(code);
    file
}
