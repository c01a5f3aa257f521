//! Images made by Debian's qemu-img, and checked with it afterwards.

mod grow;
mod space;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;

use proptest::prelude::*;
use tempfile::TempDir;
use virtio_bindings::virtio_blk::*;

use super::super::access::LockGranularity;
use super::*;
use crate::VirtioDevice;
use crate::block::image::Contents;
use crate::block::testing::*;
use crate::block::{Block, BlockSpec, ResizeError};
use crate::transport::features::has;

const LEN: usize = 4 << 20;

/// A folder of images.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs `qemu-img` in this folder; it must succeed.
    fn qemu_img(&self, arguments: &[&str]) -> String {
        let mut command = Command::new("qemu-img");
        command.args(arguments).current_dir(self.0.path());
        let run = {
            let _spawning = SPAWNING.lock();
            command.output().expect("qemu-img is missing: apt-get install qemu-utils")
        };
        let said = [run.stdout, run.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
        assert!(run.status.success(), "qemu-img {arguments:?}: {said}");
        said
    }

    /// An image of [`LEN`] bytes with these options of `qemu-img create`.
    fn create(&self, name: &str, options: &[&str]) -> PathBuf {
        self.qemu_img(&[&["create", "-q", "-f", "qcow2"], options, &[name, "4M"]].concat());
        self.path(name)
    }

    /// Checks that an image has no error and no leaked cluster.
    fn check(&self, name: &str) {
        let said = self.qemu_img(&["check", name]);
        assert!(said.contains("No errors were found"), "{said}");
    }

    /// The disk's contents according to QEMU.
    fn contents(&self, name: &str) -> Vec<u8> {
        self.qemu_img(&["convert", "-O", "raw", name, "contents.raw"]);
        fs::read(self.path("contents.raw")).unwrap()
    }
}

const READ_WRITE: Access = Access {
    read_only: false,
    direct: false,
    format: ImageFormat::Qcow2 { backing_files: true },
    sparse: true,
    lock: LockGranularity::ByteRange,
};

fn open(path: &Path, access: Access) -> Result<Qcow2, BlockError> {
    let _spawning = SPAWNING.lock();
    let ImageFile { fd, .. } = ImageFile::open(path, access)?;
    Qcow2::open(path, fd, access)
}

fn refusal(path: &Path, access: Access) -> String {
    let line = open(path, access).map(|_| ()).unwrap_err().to_string();
    assert!(!line.contains('\n') && line.starts_with("path="), "{line}");
    line
}

fn read(image: &Qcow2, offset: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0xee; len];
    assert_eq!(image.read(&mut data, offset).unwrap(), len);
    data
}

/// Zeroes a range, one piece at a time.
fn zero(image: &Qcow2, mut offset: u64, len: u64, unmap: bool) {
    let end = offset + len;
    while offset < end {
        offset += image.execute(Call::Zero { range: Range { offset, len: end - offset }, unmap }).unwrap() as u64;
    }
}

#[test]
fn an_image_whose_header_has_no_reference_count_is_refused() {
    let folder = Folder::new();
    let path = folder.create("image", &[]);
    let mut bytes = fs::read(&path).unwrap();
    let table = usize::try_from(u64::from_be_bytes(bytes[48..56].try_into().unwrap())).unwrap();
    bytes[table..table + 8].fill(0);
    fs::write(&path, bytes).unwrap();
    let line = refusal(&path, READ_WRITE);
    assert!(line.contains("is damaged: its refcount table makes no sense"), "{line}");
}

#[test]
fn qemu_reads_the_written_data_from_any_kind_of_image() {
    for options in [
        &[][..],
        &["-o", "cluster_size=512"],
        &["-o", "cluster_size=2M"],
        &["-o", "refcount_bits=1"],
        &["-o", "refcount_bits=64"],
        &["-o", "preallocation=metadata"],
        &["-o", "lazy_refcounts=on"],
        &["-o", "compat=0.10"],
    ] {
        let folder = Folder::new();
        let path = folder.create("a", options);
        let data = pattern(300_000, 7);
        {
            let image = open(&path, READ_WRITE).unwrap();
            assert_eq!(read(&image, 0, LEN), vec![0; LEN], "{options:?}");
            assert_eq!(image.write(&data, 70_000 / 512 * 512, false).unwrap(), data.len());
            assert_eq!(read(&image, 70_000 / 512 * 512, data.len()), data);
        }
        folder.check("a");
        let mut expected = vec![0; LEN];
        expected[70_000 / 512 * 512..][..data.len()].copy_from_slice(&data);
        assert!(folder.contents("a") == expected, "{options:?}");
    }
}

#[test]
fn an_image_is_over_its_backing_files_which_stay_as_they_are() {
    let folder = Folder::new();
    // The raw image is shorter than the disks over it, and the second image is shorter than the third.
    let base = pattern(1 << 20, 1);
    fs::write(folder.path("base"), &base).unwrap();
    folder.create("middle", &["-b", "base", "-F", "raw"]);
    folder.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "middle", "-F", "qcow2", "top", "6M"]);
    {
        let image = open(&folder.path("middle"), READ_WRITE).unwrap();
        image.write(&pattern(4096, 2), 8192, false).unwrap();
    }
    let middle = fs::read(folder.path("middle")).unwrap();
    {
        let image = open(&folder.path("top"), READ_WRITE).unwrap();
        assert_eq!(image.abilities().geometry.sectors, (6 << 20) / SECTOR);
        let mut expected = vec![0; 6 << 20];
        expected[..1 << 20].copy_from_slice(&base);
        expected[8192..12288].copy_from_slice(&pattern(4096, 2));
        assert!(read(&image, 0, 6 << 20) == expected);
        // Half of a cluster: the other half is copied up.
        image.write(&pattern(512, 3), 512, false).unwrap();
        image.write(&pattern(512, 4), (5 << 20) + 512, true).unwrap();
        zero(&image, 8192, 512, false);
        zero(&image, 0x2_0000, 0x1_8000, true);
        expected[512..1024].copy_from_slice(&pattern(512, 3));
        expected[(5 << 20) + 512..][..512].copy_from_slice(&pattern(512, 4));
        expected[8192..8704].fill(0);
        expected[0x2_0000..0x3_8000].fill(0);
        assert!(read(&image, 0, 6 << 20) == expected);
        drop(image);
        assert!(folder.contents("top") == expected);
    }
    folder.check("top");
    folder.check("middle");
    assert!(fs::read(folder.path("middle")).unwrap() == middle && fs::read(folder.path("base")).unwrap() == base);
}

#[test]
fn a_backing_file_is_opened_only_if_allowed_and_of_named_format() {
    let folder = Folder::new();
    fs::write(folder.path("base"), pattern(LEN, 1)).unwrap();
    let top = folder.create("top", &["-b", "base", "-F", "raw"]);
    let denied = Access { format: ImageFormat::Qcow2 { backing_files: false }, ..READ_WRITE };
    assert!(refusal(&top, denied).contains("has the backing file base; add backing_files=on"));
    // Another program writes the backing file.
    let raw = Access { format: ImageFormat::Raw, ..READ_WRITE };
    let writer = open_image(&folder.path("base"), raw).unwrap();
    assert!(refusal(&top, READ_WRITE).contains("in use"));
    drop(writer);
    let top_image = open(&top, READ_WRITE).unwrap();
    assert!(open_image(&folder.path("base"), raw).is_err(), "it is locked while an image is based on it");
    drop(top_image);
    // Makes the header's format extension an unknown one.
    let mut bytes = fs::read(&top).unwrap();
    let format = bytes.windows(4).position(|bytes| bytes == [0xe2, 0x79, 0x2a, 0xca]).unwrap();
    bytes[format..format + 4].copy_from_slice(&[0x12, 0x34, 0x56, 0x78]);
    fs::write(&top, &bytes).unwrap();
    assert!(refusal(&top, READ_WRITE).contains("qemu-img rebase -u"));
    for (name, what) in
        [("json:{}", "not a path"), ("nbd://x/y", "not a path"), ("missing", "backing file missing does not exist")]
    {
        folder.qemu_img(&["rebase", "-u", "-F", "raw", "-b", name, "top"]);
        assert!(refusal(&top, READ_WRITE).contains(what), "{name}: {}", refusal(&top, READ_WRITE));
    }
    folder.qemu_img(&["rebase", "-u", "-F", "vpc", "-b", "base", "top"]);
    assert!(refusal(&top, READ_WRITE).contains("of the format vpc"));
}

#[test]
fn a_loop_of_backing_files_is_named_and_a_long_chain_is_none() {
    let folder = Folder::new();
    let (a, b) = (folder.create("a", &[]), folder.create("b", &["-b", "a", "-F", "qcow2"]));
    let read_only = Access { read_only: true, ..READ_WRITE };
    for (image, backing) in [("a", "b"), ("a", "a"), ("b", "b")] {
        folder.qemu_img(&["rebase", "-u", "-F", "qcow2", "-b", backing, image]);
        for access in [READ_WRITE, read_only] {
            assert!(refusal(&b, access).contains("are a loop that begins with"), "{}", refusal(&b, access));
        }
    }
    assert!(refusal(&a, READ_WRITE).contains("are a loop"));
    folder.create("0", &[]);
    for n in 1..=MAX_CHAIN + 1 {
        folder.create(&n.to_string(), &["-u", "-b", &(n - 1).to_string(), "-F", "qcow2"]);
    }
    let last = folder.path(&(MAX_CHAIN + 1).to_string());
    assert!(refusal(&last, READ_WRITE).contains("more than 32 images"));
}

#[test]
fn an_invalid_or_unsupported_image_is_refused_with_the_reason() {
    let folder = Folder::new();
    fs::write(folder.path("raw"), [0; 4096]).unwrap();
    assert!(refusal(&folder.path("raw"), READ_WRITE).contains("is not a qcow2 image"));
    fs::write(folder.path("empty"), []).unwrap();
    assert!(refusal(&folder.path("empty"), READ_WRITE).contains("is not a qcow2 image"));
    for (name, options, what) in [
        ("zstd", "compression_type=zstd", "zstd"),
        ("l2", "extended_l2=on", "extended L2"),
        ("data", "data_file=elsewhere", "another file"),
    ] {
        let path = folder.create(name, &["-o", options]);
        assert!(refusal(&path, READ_WRITE).contains(what), "{name}");
    }
    let path = folder.create("a", &[]);
    let writer = open(&path, READ_WRITE).unwrap();
    assert!(refusal(&path, READ_WRITE).contains("in use"));
    drop(writer);
    let qcow2 = open_image(&path, READ_WRITE).unwrap();
    assert!(matches!(qcow2.contents(), Contents::Qcow2(_)));
}

#[test]
fn an_image_that_leads_nowhere_is_qcow2_without_being_said_so() {
    let folder = Folder::new();
    let unsaid = Access { format: ImageFormat::Unknown, ..READ_WRITE };
    let path = folder.create("alone", &[]);
    for read_only in [false, true] {
        let image = open_image(&path, Access { read_only, ..unsaid }).unwrap();
        assert!(matches!(image.contents(), Contents::Qcow2(_)) && image.size() == LEN as u64);
    }
    let target = {
        let _spawning = SPAWNING.lock();
        crate::block::image::Image::open_unlocked(&path, unsaid).unwrap()
    };
    assert!(matches!(target.contents(), Contents::Qcow2(_)));
    fs::write(folder.path("base"), vec![0; LEN]).unwrap();
    for (name, options, what) in [
        ("backed", &["-b", "base", "-F", "raw"][..], "the backing file base; add image_type=qcow2,backing_files=on"),
        ("data", &["-o", "data_file=elsewhere"], "keeps its data in another file"),
    ] {
        let path = folder.create(name, options);
        for read_only in [false, true] {
            let line = open_image(&path, Access { read_only, ..unsaid }).map(|_| ()).unwrap_err().to_string();
            assert!(line.contains(what) && line.contains("image_type=raw") && !line.contains('\n'), "{line}");
        }
        let raw = open_image(&path, Access { format: ImageFormat::Raw, ..READ_WRITE }).unwrap();
        assert!(matches!(raw.contents(), Contents::Raw(_)));
    }
}

#[test]
fn compressed_clusters_and_snapshots_are_read_and_kept() {
    let folder = Folder::new();
    let data = pattern(LEN, 5);
    fs::write(folder.path("raw"), &data).unwrap();
    folder.qemu_img(&["convert", "-c", "-O", "qcow2", "raw", "a"]);
    folder.qemu_img(&["snapshot", "-c", "before", "a"]);
    let mut expected = data.clone();
    {
        let image = open(&folder.path("a"), READ_WRITE).unwrap();
        assert!(read(&image, 0, LEN) == data);
        image.write(&pattern(100 * 512, 6), 51_200, false).unwrap();
        expected[51_200..102_400].copy_from_slice(&pattern(100 * 512, 6));
        zero(&image, 1 << 20, 1 << 20, true);
        expected[1 << 20..2 << 20].fill(0);
        assert!(read(&image, 0, LEN) == expected);
    }
    folder.check("a");
    assert!(folder.contents("a") == expected);
    folder.qemu_img(&["convert", "-l", "before", "-O", "raw", "a", "before"]);
    assert!(fs::read(folder.path("before")).unwrap() == data);
}

#[test]
fn queues_writing_zeroing_and_discarding_at_once_lose_nothing() {
    const THREADS: usize = 4;
    let folder = Folder::new();
    fs::write(folder.path("base"), pattern(LEN, 9)).unwrap();
    let path = folder.create("a", &["-b", "base", "-F", "raw", "-o", "cluster_size=4096"]);
    let image = Arc::new(open(&path, READ_WRITE).unwrap());
    let mut expected = pattern(LEN, 9);
    // Each thread writes the sectors whose numbers leave its remainder, so all threads share every cluster.
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let image = Arc::clone(&image);
            scope.spawn(move || {
                for round in 0..3 {
                    for sector in (thread..LEN / 512 / 2).step_by(THREADS) {
                        image.write(&pattern(512, (round + thread) as u8), sector as u64 * 512, false).unwrap();
                    }
                    let range = Range { offset: (LEN / 2 + thread * 65_536) as u64, len: 65_536 };
                    image.write(&pattern(65_536, 3), range.offset, false).unwrap();
                    zero(&image, range.offset, range.len, true);
                    image.execute(Call::Sync).unwrap();
                }
            });
        }
    });
    for sector in 0..LEN / 512 / 2 {
        expected[sector * 512..][..512].copy_from_slice(&pattern(512, (2 + sector % THREADS) as u8));
    }
    expected[LEN / 2..][..THREADS * 65_536].fill(0);
    assert!(read(&image, 0, LEN) == expected);
    drop(image);
    folder.check("a");
    assert!(folder.contents("a") == expected);
}

/// Zeroes some sectors of one cluster while others are written.
#[test]
fn zeroing_a_part_of_a_cluster_keeps_what_others_write() {
    const CLUSTER: usize = 4096;
    let folder = Folder::new();
    let path = folder.create("a", &["-o", "cluster_size=4096"]);
    let image = Arc::new(open(&path, READ_WRITE).unwrap());
    for at in (0..LEN).step_by(CLUSTER) {
        let at = at as u64;
        thread::scope(|scope| {
            scope.spawn(|| image.write(&pattern(512, 1), at, false).unwrap());
            scope.spawn(|| zero(&image, at + 1024, 2048, false));
        });
        assert!(read(&image, at, 512) == pattern(512, 1), "{at}");
    }
}

#[test]
fn reference_counts_that_several_entries_share_are_refused() {
    let folder = Folder::new();
    let path = folder.create("a", &[]);
    let bytes = fs::read(&path).unwrap();
    let table = u64::from_be_bytes(bytes[48..56].try_into().unwrap()) as usize;
    let first = u64::from_be_bytes(bytes[table..table + 8].try_into().unwrap());
    for second in [first, first + 512, 1 << 40] {
        let mut changed = bytes.clone();
        changed[table + 8..table + 16].copy_from_slice(&second.to_be_bytes());
        fs::write(&path, changed).unwrap();
        let line = open(&path, READ_WRITE).map(|_| ()).unwrap_err().to_string();
        assert!(line.contains("is damaged: its refcount table makes no sense"), "{second:x}: {line}");
    }
}

/// A running disk over an image in `folder`.
fn guest(path: &Path, spec: BlockSpec) -> Guest {
    let mut guest = Guest::new(true);
    guest.stop();
    {
        let _spawning = SPAWNING.lock();
        guest.device = Block::open(BlockSpec { path: path.into(), format: READ_WRITE.format, ..spec }).unwrap();
    }
    guest.start();
    guest
}

#[test]
fn a_driver_sees_a_disk_like_any_other() {
    let folder = Folder::new();
    let path = folder.create("a", &[]);
    {
        let mut guest = guest(&path, spec(true));
        let features = guest.device.features();
        assert!(has(features, VIRTIO_BLK_F_DISCARD) && has(features, VIRTIO_BLK_F_WRITE_ZEROES));
        assert_eq!(guest.device.size().get(), LEN as u64);
        let data = pattern(600 << 10, 5);
        guest.put(BUFFERS + 1, &data);
        let pieces = [(BUFFERS + 1, 1000, 0), (BUFFERS + 1001, (600 << 10) - 1000, 0)];
        assert_eq!(guest.request(VIRTIO_BLK_T_OUT, 8, &pieces), (OK, 1));
        assert_eq!(guest.read(8, data.len()), (OK, data.clone()));
        guest.put(BUFFERS, &segment(8, 8, 1));
        assert_eq!(guest.request(VIRTIO_BLK_T_WRITE_ZEROES, 0, &[(BUFFERS, 16, 0)]), (OK, 1));
        assert_eq!(guest.read(8, 4096), (OK, vec![0; 4096]));
        assert_eq!(guest.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
        assert_eq!(guest.read(LEN as u64 / 512, 512).0, IOERR);
        // Flushed data is on the medium, even if this process is killed.
        fs::copy(&path, folder.path("copy")).unwrap();
        let mut expected = vec![0; LEN];
        expected[4096..][..data.len()].copy_from_slice(&data);
        expected[4096..8192].fill(0);
        assert!(folder.contents("copy") == expected);
    }
    folder.check("a");
}

#[test]
fn a_readonly_or_version_2_image_offers_only_what_it_can_do() {
    let folder = Folder::new();
    let path = folder.create("a", &["-o", "compat=0.10"]);
    let offered = |spec: BlockSpec| {
        let guest = guest(&path, spec);
        let features = guest.device.features();
        [VIRTIO_BLK_F_RO, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES].map(|bit| has(features, bit))
    };
    assert_eq!(offered(spec(true)), [false, false, true]);
    assert_eq!(offered(BlockSpec { read_only: true, ..spec(true) }), [true, false, false]);
    let path = folder.create("b", &[]);
    let mut guest = guest(&path, BlockSpec { read_only: true, ..spec(true) });
    assert_eq!((guest.read(0, 512), guest.write(0, &[1; 512]).0), ((OK, vec![0; 512]), IOERR));
    drop(guest);
    assert!(folder.contents("b") == vec![0; LEN]);
}

#[derive(Debug, Clone)]
enum Op {
    Write { offset: u64, len: usize, seed: u8 },
    Read { offset: u64, len: usize },
    Zero { offset: u64, len: u64, unmap: bool },
    Flush,
    Reopen,
}

fn op() -> impl Strategy<Value = Op> {
    // In the first 512 KiB, so that operations overlap.
    let place = || (0..1024u64, 1..200u64).prop_map(|(sector, count)| (sector * 512, count * 512));
    prop_oneof![
        4 => (place(), any::<u8>()).prop_map(|((offset, len), seed)| Op::Write { offset, len: len as usize, seed }),
        3 => place().prop_map(|(offset, len)| Op::Read { offset, len: len as usize }),
        3 => (place(), any::<bool>()).prop_map(|((offset, len), unmap)| Op::Zero { offset, len, unmap }),
        1 => Just(Op::Flush),
        1 => Just(Op::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_operations_leave_an_image_equal_to_the_model_and_valid(
        ops in prop::collection::vec(op(), 1..40),
        cluster in prop_oneof![Just("512"), Just("4096"), Just("65536")],
        has_backing: bool,
    ) {
        let folder = Folder::new();
        let cluster = format!("cluster_size={cluster}");
        let mut model = vec![0; LEN];
        let mut options = vec!["-o", &cluster];
        if has_backing {
            model[..700_416].copy_from_slice(&pattern(700_416, 1));
            fs::write(folder.path("base"), &model[..700_416]).unwrap();
            options.extend(["-b", "base", "-F", "raw"]);
        }
        let path = folder.create("a", &options);
        let mut image = Some(open(&path, READ_WRITE).unwrap());
        for op in ops {
            let now = image.as_ref().unwrap();
            match op {
                Op::Write { offset, len, seed } => {
                    let data = pattern(len, seed);
                    now.write(&data, offset, seed % 8 == 0).unwrap();
                    model[offset as usize..][..len].copy_from_slice(&data);
                }
                Op::Read { offset, len } => {
                    prop_assert!(read(now, offset, len) == model[offset as usize..][..len]);
                }
                Op::Zero { offset, len, unmap } => {
                    zero(now, offset, len, unmap);
                    model[offset as usize..][..len as usize].fill(0);
                }
                Op::Flush => _ = now.execute(Call::Sync).unwrap(),
                Op::Reopen => {
                    drop(image.take());
                    folder.check("a");
                    image = Some(open(&path, READ_WRITE).unwrap());
                }
            }
        }
        prop_assert!(read(image.as_ref().unwrap(), 0, LEN) == model);
        drop(image);
        folder.check("a");
        prop_assert!(folder.contents("a") == model);
    }
}

#[test]
fn the_files_of_a_chain_are_found_without_opening_them_for_use() {
    let folder = Folder::new();
    fs::write(folder.path("bottom.raw"), vec![0; LEN]).unwrap();
    folder.create("middle", &["-b", "bottom.raw", "-F", "raw"]);
    let top = folder.create("top", &["-b", "middle", "-F", "qcow2"]);
    assert_eq!(chain(&top), ["middle", "bottom.raw"].map(|name| folder.path(name)));
    // Locks of others are not disturbed, and the raw file's contents name nothing.
    let _disk = open(&top, READ_WRITE).unwrap();
    assert_eq!(chain(&top).len(), 2);
    assert_eq!(chain(&folder.path("bottom.raw")), [""; 0].map(PathBuf::from));
    assert_eq!(chain(&folder.path("missing")), [""; 0].map(PathBuf::from));
}

#[test]
fn a_chain_without_an_end_is_looked_at_up_to_the_limit() {
    let folder = Folder::new();
    folder.create("a", &[]);
    folder.qemu_img(&["rebase", "-u", "-b", "a", "-F", "qcow2", "a"]);
    assert_eq!(chain(&folder.path("a")).len(), MAX_CHAIN);
}

#[test]
fn one_programs_writes_are_seen_by_the_next_to_take_the_image() {
    let folder = Folder::new();
    let path = folder.create("disk", &["-o", "cluster_size=4k"]);
    let shared = || {
        let _spawning = SPAWNING.lock();
        crate::block::image::Image::open_unlocked(&path, READ_WRITE).unwrap()
    };
    let (source, target) = (shared(), shared());
    source.take().unwrap();
    let of = |image: &crate::block::image::Image, act: &mut dyn FnMut(&Qcow2)| match image.contents() {
        Contents::Qcow2(qcow2) => act(qcow2),
        Contents::Raw(_) => unreachable!(),
    };
    // The two write in turn, and each sees the other's writes: tables are read again.
    for turn in 0..6_u8 {
        let (one, other) = if turn % 2 == 0 { (&source, &target) } else { (&target, &source) };
        of(one, &mut |image| {
            for before in 0..turn {
                assert_eq!(read(image, u64::from(before) * 65536, 512), [before + 1; 512]);
            }
            image.write(&[turn + 1; 65536], u64::from(turn) * 65536, false).unwrap();
        });
        of(other, &mut |image| assert!(image.write(&[0; 512], 0, false).is_err(), "it is not its own"));
        assert!(matches!(other.take(), Err(BlockError::InUse(_))));
        one.release().unwrap();
        folder.check("disk");
        other.take().unwrap();
    }
    drop((source, target));
    folder.check("disk");
    assert_eq!(
        folder.contents("disk")[..6 << 16].chunks(65536).map(|part| part[0]).collect::<Vec<_>>(),
        [1, 2, 3, 4, 5, 6]
    );
}
