//! Space that a guest frees.

use super::*;

fn blocks(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks()
}

/// True if files of the temporary directory have holes.
fn has_holes(folder: &Folder) -> bool {
    let path = folder.path("probe");
    fs::write(&path, vec![1; 1 << 20]).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, flags, 0, 1 << 20).is_ok()
}

#[test]
fn space_that_a_driver_gives_up_leaves_the_file() {
    for (kind, flags, base) in
        [(VIRTIO_BLK_T_DISCARD, 0, false), (VIRTIO_BLK_T_WRITE_ZEROES, 1, false), (VIRTIO_BLK_T_DISCARD, 0, true)]
    {
        let folder = Folder::new();
        let holes = has_holes(&folder);
        fs::write(folder.path("base"), pattern(LEN, 1)).unwrap();
        let path = folder.create("a", if base { &["-b", "base", "-F", "raw"] } else { &[] });
        let mut guest = guest(&path, spec(true));
        for part in 0..LEN / 65_536 {
            assert_eq!(guest.write(part as u64 * 128, &pattern(65_536, 2)).0, OK);
        }
        assert_eq!(guest.request(VIRTIO_BLK_T_FLUSH, 0, &[]).0, OK);
        let (full, length) = (blocks(&path), fs::metadata(&path).unwrap().len());
        assert!(full * 512 >= LEN as u64);
        // All except the first and the last half cluster.
        guest.put(BUFFERS, &segment(64, (LEN / 512) as u32 - 128, flags));
        assert_eq!(guest.request(kind, 0, &[(BUFFERS, 16, 0)]), (OK, 1));
        assert_eq!(guest.request(VIRTIO_BLK_T_FLUSH, 0, &[]).0, OK);
        assert!(!holes || blocks(&path) < full / 4, "{} of {full}", blocks(&path));
        let mut expected = vec![0; LEN];
        expected[..32_768].copy_from_slice(&pattern(65_536, 2)[..32_768]);
        expected[LEN - 32_768..].copy_from_slice(&pattern(65_536, 2)[32_768..]);
        assert_eq!(guest.read(64, 65_536), (OK, expected[32_768..98_304].to_vec()));
        // Freed space is used again.
        assert_eq!(guest.write(256, &pattern(65_536, 3)).0, OK);
        expected[131_072..196_608].copy_from_slice(&pattern(65_536, 3));
        drop(guest);
        folder.check("a");
        assert!(folder.contents("a") == expected, "{kind} {base}");
        assert_eq!(fs::metadata(&path).unwrap().len(), length);
    }
}

#[test]
fn clusters_of_a_snapshot_stay_when_the_disk_gives_them_up() {
    let folder = Folder::new();
    let data = pattern(LEN, 4);
    fs::write(folder.path("raw"), &data).unwrap();
    folder.qemu_img(&["convert", "-O", "qcow2", "raw", "a"]);
    folder.qemu_img(&["snapshot", "-c", "before", "a"]);
    let image = open(&folder.path("a"), READ_WRITE).unwrap();
    zero(&image, 0, LEN as u64, true);
    assert!(read(&image, 0, LEN) == vec![0; LEN]);
    drop(image);
    folder.check("a");
    folder.qemu_img(&["convert", "-l", "before", "-O", "raw", "a", "before"]);
    assert!(fs::read(folder.path("before")).unwrap() == data);
}

#[test]
fn an_image_is_sound_if_the_program_ends_after_a_discard() {
    let folder = Folder::new();
    let path = folder.create("a", &["-o", "cluster_size=4096"]);
    let data = pattern(LEN, 6);
    let image = open(&path, READ_WRITE).unwrap();
    image.write(&data, 0, true).unwrap();
    zero(&image, 1 << 20, 1 << 20, true);
    // The tables are still only in memory.
    fs::copy(&path, folder.path("copy")).unwrap();
    folder.qemu_img(&["check", "-q", "-r", "leaks", "copy"]);
    let contents = folder.contents("copy");
    assert!(contents[..1 << 20] == data[..1 << 20] && contents[2 << 20..] == data[2 << 20..]);
    let given_up = contents[1 << 20..2 << 20].chunks(4096).zip(data[1 << 20..].chunks(4096));
    assert!(given_up.into_iter().all(|(now, before)| now == before || now.iter().all(|byte| *byte == 0)));
}

#[test]
fn a_large_range_is_given_up_in_pieces_of_a_few_clusters() {
    let folder = Folder::new();
    let path = folder.create("a", &["-o", "cluster_size=4096"]);
    let image = open(&path, READ_WRITE).unwrap();
    for unmap in [false, true] {
        let call = |offset, len| image.execute(Call::Zero { range: Range { offset, len }, unmap }).unwrap() as u64;
        assert_eq!([call(0, LEN as u64), call(512, LEN as u64 - 512)], [AT_ONCE * 4096, AT_ONCE * 4096 - 512]);
        assert_eq!([call(512, 512), call(LEN as u64 - 512, 512)], [512, 512]);
    }
}
