//! Images whose disks are enlarged.

use super::*;
use crate::block::image::qcow2::blocks::testing::{LEFT, is_out};

const ACCESS: Access = Access { format: ImageFormat::Qcow2 { backing_files: true }, ..READ_WRITE };

fn info(folder: &Folder, name: &str) -> String {
    folder.qemu_img(&["info", "--output=json", name])
}

#[test]
fn a_disk_grows_whatever_its_clusters_and_counts_are() {
    for options in [
        "cluster_size=64K",
        "cluster_size=512",
        "cluster_size=4096",
        "cluster_size=2M",
        "cluster_size=512,refcount_bits=1",
        "cluster_size=512,refcount_bits=4",
        "cluster_size=4096,refcount_bits=64",
        "compat=0.10",
    ] {
        let folder = Folder::new();
        let path = folder.create("a", &["-o", options]);
        let image = open(&path, ACCESS).unwrap();
        let mut model = vec![0; 96 << 20];
        let mut write = |offset: usize, seed| {
            let data = pattern(70_000 / 512 * 512, seed);
            image.write(&data, offset as u64, false).unwrap();
            model[offset..offset + data.len()].copy_from_slice(&data);
        };
        write(0, 1);
        write(LEN - 71_680, 2);
        for size in [(5 << 20) + 512, 20 << 20, 96 << 20] {
            image.resize(size as u64).unwrap();
            assert_eq!(image.abilities().geometry.sectors, size as u64 / 512, "{options}");
            write(size - 71_680, 3);
            write(size / 2, 4);
        }
        assert!(read(&image, 0, model.len()) == model, "{options}");
        drop(image);
        folder.check("a");
        assert!(folder.contents("a") == model, "{options}");
        let image = open(&path, ACCESS).unwrap();
        assert!(read(&image, 0, model.len()) == model, "{options}");
    }
}

#[test]
fn an_image_is_sound_wherever_its_growth_is_cut_off() {
    // The first moves the table and needs refcount blocks, the second extends the table, the third changes the header.
    for (options, size) in
        [("cluster_size=512", 64 << 20), ("cluster_size=4096", 8 << 20), ("cluster_size=2M", 8 << 20)]
    {
        let mut cuts = 0;
        for writes in 0.. {
            let folder = Folder::new();
            let path = folder.create("a", &["-o", options]);
            let image = open(&path, ACCESS).unwrap();
            let data = pattern(LEN, 7);
            image.write(&data, 0, false).unwrap();
            LEFT.set(Some(writes));
            let grown = image.resize(size);
            let done = grown.is_ok() && !is_out();
            LEFT.set(None);
            fs::copy(&path, folder.path("copy")).unwrap();
            // Only unused clusters may be left.
            folder.qemu_img(&["check", "-q", "-r", "leaks", "copy"]);
            let contents = folder.contents("copy");
            assert!(contents[..LEN] == data && contents[LEN..].iter().all(|byte| *byte == 0), "{options} {writes}");
            // The image is still usable, and can be enlarged later.
            image.resize(size).unwrap();
            image.write(&pattern(512, 9), size - 512, true).unwrap();
            assert!(read(&image, 0, LEN) == data, "{options} {writes}");
            drop(image);
            folder.qemu_img(&["check", "-q", "-r", "leaks", "a"]);
            assert!(folder.contents("a")[size as usize - 512..] == pattern(512, 9));
            if done {
                break;
            }
            cuts += 1;
        }
        assert!(cuts >= 1, "{options}");
    }
}

#[test]
fn added_space_is_zero_although_the_last_cluster_was_longer() {
    let folder = Folder::new();
    fs::write(folder.path("raw"), pattern(1 << 20, 3)).unwrap();
    folder.qemu_img(&["convert", "-O", "qcow2", "raw", "a"]);
    folder.qemu_img(&["resize", "-q", "--shrink", "a", "1000K"]);
    let image = open(&folder.path("a"), ACCESS).unwrap();
    image.resize(2 << 20).unwrap();
    let mut expected = pattern(1 << 20, 3);
    expected[1000 << 10..].fill(0);
    expected.resize(2 << 20, 0);
    assert!(read(&image, 0, 2 << 20) == expected);
    drop(image);
    folder.check("a");
    assert!(folder.contents("a") == expected);
}

#[test]
fn a_disk_grows_beyond_its_backing_file_and_reads_zeros_there() {
    let folder = Folder::new();
    let base = pattern(LEN, 5);
    fs::write(folder.path("base"), &base).unwrap();
    let path = folder.create("a", &["-b", "base", "-F", "raw"]);
    let image = open(&path, ACCESS).unwrap();
    image.resize(8 << 20).unwrap();
    let expected = [base, vec![0; (8 << 20) - LEN]].concat();
    assert!(read(&image, 0, 8 << 20) == expected);
    drop(image);
    folder.check("a");
    assert!(folder.contents("a") == expected);
}

#[test]
fn a_size_that_an_image_cannot_have_is_refused() {
    let folder = Folder::new();
    let path = folder.create("a", &[]);
    {
        let image = open_image(&path, ACCESS).unwrap();
        assert!(matches!(image.resize(LEN as u64 - 512), Err(ResizeError::Shrink)));
        assert!(matches!(image.resize(LEN as u64 + 1), Err(ResizeError::Size(512))));
        assert!(matches!(image.resize(1 << 62), Err(ResizeError::TooLarge)));
        assert_eq!(image.size(), LEN as u64);
    }
    let reader = open_image(&path, Access { read_only: true, ..ACCESS }).unwrap();
    assert!(matches!(reader.resize(8 << 20), Err(ResizeError::ReadOnly)));
    drop(reader);
    folder.qemu_img(&["snapshot", "-c", "before", "a"]);
    assert!(matches!(open(&path, ACCESS).unwrap().resize(8 << 20), Err(ResizeError::Snapshots(1))));
    fs::write(folder.path("base"), vec![1; 6 << 20]).unwrap();
    let over = folder.create("b", &["-b", "base", "-F", "raw"]);
    assert!(matches!(open(&over, ACCESS).unwrap().resize(8 << 20), Err(ResizeError::Backing(size)) if size == 6 << 20));
    for name in ["a", "b"] {
        folder.check(name);
        assert!(info(&folder, name).contains("\"virtual-size\": 4194304"));
    }
}

#[test]
fn a_driver_sees_its_qcow2_disk_grow() {
    let folder = Folder::new();
    let path = folder.create("a", &[]);
    let mut guest = guest(&path, spec(true));
    assert_eq!(guest.write(0, &[1; 512]).0, OK);
    let generation = guest.device.config_generation();
    let size = guest.device.size();
    size.set(8 << 20).unwrap();
    assert_ne!(guest.device.config_generation(), generation);
    let mut sectors = [0; 8];
    guest.device.config_read(0, &mut sectors);
    assert_eq!(u64::from_le_bytes(sectors), (8 << 20) / 512);
    assert_eq!(guest.write(((8 << 20) - 512) / 512, &[2; 512]).0, OK);
    drop((guest, size));
    folder.check("a");
    assert_eq!(folder.contents("a")[(8 << 20) - 512..], [2; 512]);
}
