//! Files that are accepted as images, and files that are refused.

use std::fs;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;

use rustix::fs::{FileType, Mode};
use rustix::io::Errno;

use super::super::testing::open_image;
use super::access::LockGranularity;
use super::lock::try_lock;
use super::raw::exponent;
use super::*;

const WRITE: Access = Access {
    read_only: false,
    direct: false,
    format: ImageFormat::Unknown,
    sparse: true,
    lock: LockGranularity::ByteRange,
};
const READ: Access = Access { read_only: true, ..WRITE };

fn image(len: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(len).unwrap();
    file
}

fn refusal(path: &Path, access: Access) -> String {
    let line = open_image(path, access).map(|_| ()).unwrap_err().to_string();
    assert!(!line.contains('\n') && line.contains("path="), "{line}");
    line
}

#[test]
fn a_file_of_whole_blocks_is_a_disk() {
    let file = image(1 << 20);
    let image = open_image(file.path(), WRITE).unwrap();
    let Abilities { geometry, read_only, .. } = image.abilities();
    assert_eq!((geometry.sectors, geometry.block_size, read_only, image.alignment), (2048, 512, false, 1));
    assert!(geometry.physical_exponent <= 7);
    assert_eq!([exponent(4096, 512), exponent(512, 512), exponent(512, 4096), exponent(3000, 512)], [3, 0, 0, 0]);
}

#[test]
fn a_path_that_is_no_disk_is_refused_with_a_way_out() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("none.raw");
    assert!(refusal(&missing, WRITE).contains("truncate -s 10G"));
    assert!(refusal(directory.path(), READ).contains("is a directory"));
    assert!(refusal(directory.path(), WRITE).contains("is a directory"));
    assert!(refusal(Path::new("/dev/null"), WRITE).contains("is a character device"));
    let socket = directory.path().join("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    assert!(refusal(&socket, WRITE).contains("is a socket"));
    for len in [0, 511] {
        assert!(refusal(image(len).path(), WRITE).contains("is less than a block of 512 bytes"), "{len}");
    }
    assert!(BlockError::open(&missing, false, Errno::ACCESS).to_string().contains("add readonly=on"));
    assert!(BlockError::open(&missing, true, Errno::ACCESS).to_string().contains("cannot be read"));
}

#[test]
fn bytes_behind_the_last_whole_block_are_hidden_and_kept() {
    let mut file = image(0);
    file.write_all(&[7; 1100]).unwrap();
    let image = open_image(file.path(), WRITE).unwrap();
    assert_eq!((image.abilities().geometry.sectors, image.size()), (2, 1024));
    // The lock changes owners at the size that the guest knows.
    image.release().unwrap();
    image.take().unwrap();
    // A failed resize changes nothing.
    assert!(matches!(image.resize(1 << 62), Err(ResizeError::TooLarge)));
    assert_eq!((fs::read(file.path()).unwrap(), image.size()), (vec![7; 1100], 1024));
    image.resize(1536).unwrap();
    assert_eq!((fs::metadata(file.path()).unwrap().len(), image.size()), (1536, 1536));
}

#[test]
fn a_pipe_is_refused_without_waiting_for_its_other_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    assert!(refusal(&path, READ).contains("is a pipe"));
}

#[test]
fn an_image_of_another_format_is_refused_unless_given_as_raw() {
    let file = image(4096);
    fs::write(file.path(), [&b"QFI\xfb"[..], &[0; 508]].concat()).unwrap();
    assert!(refusal(file.path(), WRITE).contains("begins like a qcow2 image and has version 0"));
    assert!(refusal(file.path(), WRITE).contains("add image_type=raw"));
    fs::write(file.path(), [&b"vhdxfile"[..], &[0; 504]].concat()).unwrap();
    assert!(refusal(file.path(), WRITE).contains("qemu-img convert -O raw"));
    assert!(open_image(file.path(), Access { format: ImageFormat::Raw, ..WRITE }).is_ok());
}

#[test]
fn a_writer_excludes_others_and_readers_do_not() {
    let file = image(512);
    let writer = open_image(file.path(), WRITE).unwrap();
    assert!(refusal(file.path(), WRITE).contains("in use"));
    assert!(refusal(file.path(), READ).contains("in use"));
    drop(writer);
    let _readers = [0; 2].map(|_| open_image(file.path(), READ).unwrap());
    assert!(refusal(file.path(), WRITE).contains("in use"));
}

#[test]
fn a_full_lock_reaches_beyond_the_end_and_a_byte_lock_does_not() {
    let beyond = |granularity| {
        let file = image(4096);
        let _image = open_image(file.path(), Access { lock: granularity, ..WRITE }).unwrap();
        let other = fs::File::options().write(true).read(true).open(file.path()).unwrap();
        let range = |start, len| try_lock(other.as_fd(), false, start, len).is_ok();
        assert!(!range(0, 1) && !range(4095, 1));
        range(4096, 1)
    };
    assert!(beyond(LockGranularity::ByteRange));
    assert!(!beyond(LockGranularity::Full));
}

#[test]
fn a_nonsparse_image_is_allocated_and_discards_nothing() {
    let file = image(1 << 20);
    let sparse = open_image(file.path(), WRITE).unwrap();
    assert!(sparse.abilities().zero);
    drop(sparse);
    let blocks = || std::os::unix::fs::MetadataExt::blocks(&file.as_file().metadata().unwrap());
    assert_eq!(blocks(), 0);
    let full = open_image(file.path(), Access { sparse: false, ..WRITE }).unwrap();
    assert!(blocks() >= 2048, "{}", blocks());
    assert!(!full.abilities().discard);
    full.resize(2 << 20).unwrap();
    assert!(blocks() >= 4096, "{}", blocks());
    let unwritten = image(1 << 20);
    let _reader = open_image(unwritten.path(), Access { sparse: false, ..READ }).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::blocks(&unwritten.as_file().metadata().unwrap()), 0);
}

#[test]
fn an_image_has_the_size_that_it_is_given_or_keeps_its_own() {
    let file = image(1 << 20);
    let image = open_image(file.path(), WRITE).unwrap();
    let len = || file.as_file().metadata().unwrap().len();
    for size in [4 << 20, 512, 1 << 20] {
        image.resize(size).unwrap();
        assert_eq!((len(), image.size()), (size, size));
    }
    for size in [0, 511, 513, u64::MAX] {
        assert!(matches!(image.resize(size), Err(ResizeError::Size(512))), "{size}");
    }
    for size in [u64::MAX - 511, i64::MAX as u64 - 511] {
        assert!(matches!(image.resize(size), Err(ResizeError::TooLarge)), "{size}");
    }
    assert_eq!((len(), image.size()), (1 << 20, 1 << 20));
    // The added part is locked as well.
    image.resize(2 << 20).unwrap();
    let other = fs::File::options().write(true).read(true).open(file.path()).unwrap();
    assert!(try_lock(other.as_fd(), false, 3 << 19, 1).is_err());
    drop(image);
    let reader = open_image(file.path(), READ).unwrap();
    assert!(matches!(reader.resize(4096), Err(ResizeError::ReadOnly)));
}

#[test]
fn direct_access_has_aligned_blocks_or_is_refused() {
    let file = image(1 << 20);
    match open_image(file.path(), Access { direct: true, ..WRITE }) {
        Ok(image) => {
            assert!(image.alignment >= 512);
            assert_eq!(image.alignment, image.abilities.geometry.block_size as usize);
        }
        Err(error) => assert!(matches!(error, BlockError::Direct(_)), "{error}"),
    }
}

#[test]
fn a_released_lock_can_be_taken_by_another_and_taken_back() {
    let file = image(1 << 20);
    let source = open_image(file.path(), WRITE).unwrap();
    let target = Image::open_unlocked(file.path(), WRITE).unwrap();
    assert!(target.take().unwrap_err().to_string().contains("in use by another program"));
    source.release().unwrap();
    source.release().unwrap();
    target.take().unwrap();
    target.take().unwrap();
    assert!(matches!(source.take(), Err(BlockError::InUse(_))));
    target.release().unwrap();
    source.take().unwrap();
    // A reader excludes no other reader, and keeps its lock.
    let readable = image(4096);
    let reader = Image::open_unlocked(readable.path(), READ).unwrap();
    reader.release().unwrap();
    assert!(matches!(open_image(readable.path(), WRITE), Err(BlockError::InUse(_))));
}

#[test]
fn an_image_of_another_size_is_not_taken() {
    let file = image(1 << 20);
    let target = Image::open_unlocked(file.path(), WRITE).unwrap();
    file.as_file().set_len(2 << 20).unwrap();
    let line = target.take().unwrap_err().to_string();
    assert!(line.contains("has 2097152 bytes, and had 1048576 when it was opened"), "{line}");
    open_image(file.path(), WRITE).unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    target.take().unwrap();
}
