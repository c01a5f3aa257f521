//! The `newc` cpio archive that Linux unpacks as its initramfs (Linux `Documentation/driver-api/early-userspace/buffer-format.rst`).

/// An archive being written. Every entry belongs to root, and the same calls give the same bytes.
#[derive(Default)]
pub struct Cpio {
    bytes: Vec<u8>,
    inode: u32,
}

const DIRECTORY: u32 = 0o040_755;
const SYMLINK: u32 = 0o120_777;
const REGULAR: u32 = 0o100_000;
const CHARACTER_DEVICE: u32 = 0o020_600;

impl Cpio {
    /// An empty archive.
    pub fn new() -> Cpio {
        Cpio::default()
    }

    /// Adds a directory. Parents come first: the kernel does not make them.
    pub fn directory(&mut self, path: &str) -> &mut Cpio {
        self.entry(path, DIRECTORY, (0, 0), &[])
    }

    /// Adds a regular file with the permission bits `mode`.
    pub fn file(&mut self, path: &str, mode: u32, contents: &[u8]) -> &mut Cpio {
        self.entry(path, REGULAR | mode, (0, 0), contents)
    }

    /// Adds a symbolic link at `path` that points to `target`.
    pub fn symlink(&mut self, path: &str, target: &str) -> &mut Cpio {
        self.entry(path, SYMLINK, (0, 0), target.as_bytes())
    }

    /// Adds a character device with the numbers `major` and `minor`.
    pub fn character_device(&mut self, path: &str, major: u32, minor: u32) -> &mut Cpio {
        self.entry(path, CHARACTER_DEVICE, (major, minor), &[])
    }

    /// The finished archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), contents: &[u8]) -> &mut Cpio {
        self.inode += 1;
        let name = path.trim_start_matches('/');
        let fields =
            [self.inode, mode, 0, 0, 1, 0, contents.len() as u32, 0, 0, device.0, device.1, name.len() as u32 + 1, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(contents);
        self.pad();
        self
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_a_header_of_110_bytes_a_name_and_contents_each_padded_to_4() {
        let mut archive = Cpio::new();
        archive.file("/a", 0o644, b"hello");
        let bytes = archive.bytes.clone();
        assert_eq!(&bytes[..6], b"070701");
        assert_eq!(&bytes[14..22], b"000081a4", "mode: regular, 0644");
        assert_eq!(&bytes[54..62], b"00000005", "size");
        assert_eq!(&bytes[94..102], b"00000002", "name size with its NUL");
        assert_eq!(&bytes[110..112], b"a\0");
        assert_eq!(&bytes[112..117], b"hello");
        assert_eq!(bytes.len(), 120);
    }

    #[test]
    fn an_archive_ends_with_the_trailer_and_whole_blocks() {
        let bytes = Cpio::new().finish();
        assert_eq!(bytes.len(), 512);
        assert_eq!(&bytes[110..120], b"TRAILER!!!");
    }
}
