//! Guest memory as a file: saving, checking, loading.
//!
//! Zero pages are holes of the file, whether they were ever written or not.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use virtio_devices::{GuestMap, GuestRegion};
use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use super::image_layout::{ImageLayout, TRAILER, has_named_file, is_kept_by_its_file, range};
use super::present::{PAGE, Pages, data};

/// Bytes per read or write.
const CHUNK: usize = 1 << 20;
/// Bytes between flushes. Bounds the time to cancel a snapshot.
const FLUSH: u64 = 64 << 20;
/// First bytes of the trailer; the snapshot's own number follows.
const MAGIC: [u8; 16] = *b"guest memory v1\n";

/// Random id that all files of a snapshot share.
pub(crate) type SnapshotId = [u8; 16];

/// Writes `memory` to the empty `file`. Returns the bytes of nonzero pages. The guest must not run.
///
/// # Errors
///
/// Fails if the file cannot be written, or with `Interrupted` once `stop` returns true.
pub(crate) fn save(
    memory: &GuestMap,
    layout: &ImageLayout,
    file: &File,
    id: &SnapshotId,
    stop: &dyn Fn() -> bool,
) -> io::Result<u64> {
    file.set_len(layout.file_size)?;
    let (pages, mut chunk, mut written, mut flushed) = (Pages::new(), vec![0; CHUNK], 0, 0);
    for (region, offset) in placed(memory, layout) {
        pages.each(region, &mut |range| {
            let mut next = range.start;
            while next < range.end {
                if stop() {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                let len = usize::try_from(range.end - next).unwrap_or(CHUNK).min(CHUNK);
                let bytes = chunk.get_mut(..len).unwrap_or_default();
                region.read_slice(bytes, MemoryRegionAddress(next)).map_err(io::Error::other)?;
                written += write_pages(bytes, file, offset + next)?;
                if written >= flushed + FLUSH {
                    file.sync_data()?;
                    flushed = written;
                }
                next += len as u64;
            }
            Ok(())
        })?;
    }
    file.write_all_at(&trailer(id), layout.trailer())?;
    Ok(written)
}

/// Writes the nonzero pages of `bytes` to `offset`. Returns their size in bytes.
fn write_pages(bytes: &[u8], file: &File, offset: u64) -> io::Result<u64> {
    let (mut start, mut written) = (0, 0);
    let mut flush = |range: Range<usize>| {
        let run = bytes.get(range.clone()).unwrap_or_default();
        written += run.len() as u64;
        if run.is_empty() { Ok(()) } else { file.write_all_at(run, offset + range.start as u64) }
    };
    let mut end = 0;
    for page in bytes.chunks(PAGE as usize) {
        if is_zero(page) {
            flush(start..end)?;
            start = end + page.len();
        }
        end += page.len();
    }
    flush(start..end)?;
    Ok(written)
}

/// True if all bytes are 0.
fn is_zero(page: &[u8]) -> bool {
    // The compiler vectorizes blocks without a branch between bytes.
    page.chunks(256).all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
}

fn trailer(id: &SnapshotId) -> [u8; TRAILER as usize] {
    let mut trailer = [0; TRAILER as usize];
    for (byte, value) in trailer.iter_mut().zip(MAGIC.iter().chain(id)) {
        *byte = *value;
    }
    trailer
}

/// Checks that `file` is the memory of snapshot `id` in this layout.
///
/// # Errors
///
/// Fails with the fault of the file.
pub(crate) fn check(file: &File, layout: &ImageLayout, id: &SnapshotId) -> Result<(), String> {
    let failed = |error: io::Error| format!("cannot be read: {error}");
    let found = file.metadata().map_err(failed)?;
    if !found.is_file() {
        return Err("not a regular file".to_string());
    }
    if found.len() != layout.file_size {
        let expected = layout.file_size;
        return Err(format!("{} bytes long instead of {expected}: it was cut short, or is another's", found.len()));
    }
    let mut bytes = [0; TRAILER as usize];
    file.read_exact_at(&mut bytes, layout.trailer()).map_err(failed)?;
    if bytes == trailer(id) { Ok(()) } else { Err("the memory of another snapshot".to_string()) }
}

/// Reads `file` into `memory`, which is zero. Returns the number of bytes read.
///
/// # Errors
///
/// Fails if the file cannot be read, with `UnexpectedEof` if it was truncated, or with `Interrupted` once `stop`
/// returns true.
pub(crate) fn load(file: &File, layout: &ImageLayout, memory: &GuestMap, stop: &dyn Fn() -> bool) -> io::Result<u64> {
    let mut read = 0;
    for (region, offset) in placed(memory, layout) {
        if has_named_file(region) {
            read += differ(file, offset, region, stop)?;
            continue;
        }
        data(file, &(offset..offset + region.len()), &mut |range| {
            let mut next = range.start;
            while next < range.end {
                if stop() {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                let len = usize::try_from(range.end - next).unwrap_or(CHUNK).min(CHUNK);
                fill(file, next, region, next - offset, len)?;
                next += len as u64;
                read += len as u64;
            }
            Ok(())
        })?;
    }
    // A truncated part looks like a hole.
    if file.metadata()?.len() < layout.file_size {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(read)
}

/// Flushes memory that named files keep.
///
/// # Errors
///
/// Fails if a file cannot be flushed.
pub(crate) fn flush_elsewhere(memory: &GuestMap) -> io::Result<()> {
    let kept = memory.iter().filter(|region| is_kept_by_its_file(region));
    kept.filter_map(|region| region.file_offset()).try_for_each(|file| file.file().sync_data())
}

/// Returns the regions that are in the file, with their offsets.
pub(crate) fn placed<'a>(
    memory: &'a GuestMap,
    layout: &'a ImageLayout,
) -> impl Iterator<Item = (&'a GuestRegion, u64)> {
    memory.iter().filter_map(|region| Some((region, layout.offset(&range(region))?)))
}

/// Copies `file` from `from` on to `region`, skipping equal pages, which stay the region's own file's.
fn differ(file: &File, from: u64, region: &GuestRegion, stop: &dyn Fn() -> bool) -> io::Result<u64> {
    let (mut wanted, mut present) = (vec![0; CHUNK], vec![0; CHUNK]);
    let (mut next, mut written) = (0, 0);
    while next < region.len() {
        if stop() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let len = usize::try_from(region.len() - next).unwrap_or(CHUNK).min(CHUNK);
        let (wanted, present) = (wanted.get_mut(..len), present.get_mut(..len));
        let (wanted, present) = (wanted.unwrap_or_default(), present.unwrap_or_default());
        file.read_exact_at(wanted, from + next)?;
        region.read_slice(present, MemoryRegionAddress(next)).map_err(io::Error::other)?;
        let pages =
            wanted.chunks(PAGE as usize).zip(present.chunks(PAGE as usize)).zip((next..).step_by(PAGE as usize));
        for ((wanted, present), at) in pages {
            if wanted != present {
                region.write_slice(wanted, MemoryRegionAddress(at)).map_err(io::Error::other)?;
                written += wanted.len() as u64;
            }
        }
        next += len as u64;
    }
    Ok(written)
}

/// Reads `len` bytes of the file into the region.
fn fill(mut file: &File, from: u64, region: &GuestRegion, at: u64, len: usize) -> io::Result<()> {
    rustix::fs::seek(file, rustix::fs::SeekFrom::Start(from))?;
    region.read_exact_volatile_from(MemoryRegionAddress(at), &mut file, len).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use vm_memory::GuestAddress;

    use super::*;

    const MIB: u64 = 1 << 20;
    const ID: SnapshotId = [9; 16];

    fn memory() -> GuestMap {
        let ranges = [(GuestAddress(0), 5 * MIB as usize + 4096), (GuestAddress(1 << 32), 3 * MIB as usize)];
        GuestMap::from_ranges(&ranges).unwrap()
    }

    fn filled() -> GuestMap {
        let memory = memory();
        for (address, byte) in [(0, 1u8), (4095, 2), (5 * MIB, 3), (5 * MIB + 4095, 4), (1 << 32, 5)] {
            memory.write_obj(byte, GuestAddress(address)).unwrap();
        }
        memory.write_slice(&[7; 3 * 4096], GuestAddress(2 * MIB - 100)).unwrap();
        // Allocated zero pages.
        memory.write_slice(&[0; 64 << 10], GuestAddress(3 * MIB)).unwrap();
        memory
    }

    fn bytes(memory: &GuestMap) -> Vec<u8> {
        let mut all = Vec::new();
        for region in memory.iter() {
            let mut bytes = vec![0; region.size()];
            region.read_slice(&mut bytes, MemoryRegionAddress(0)).unwrap();
            all.extend(bytes);
        }
        all
    }

    #[test]
    fn memory_reads_back_as_written_and_zeros_take_no_room() {
        let (file, memory) = (tempfile::tempfile().unwrap(), filled());
        let layout = ImageLayout::of_memory(&memory).unwrap();
        let written = save(&memory, &layout, &file, &ID, &|| false).unwrap();
        assert_eq!(written, 7 * 4096);
        check(&file, &layout, &ID).unwrap();
        assert!(file.metadata().unwrap().blocks() * 512 <= written + (64 << 10));
        let other = self::memory();
        let read = load(&file, &layout, &other, &|| false).unwrap();
        assert!(read < 2 * MIB, "{read}");
        assert!(bytes(&memory) == bytes(&other));
        assert_eq!(load(&file, &layout, &other, &|| true).unwrap_err().kind(), io::ErrorKind::Interrupted);
        let stopped = save(&memory, &layout, &tempfile::tempfile().unwrap(), &ID, &|| true);
        assert_eq!(stopped.unwrap_err().kind(), io::ErrorKind::Interrupted);
    }

    #[test]
    fn a_file_with_other_contents_gets_those_of_the_image() {
        let (file, memory) = (tempfile::tempfile().unwrap(), filled());
        let layout = ImageLayout::of_memory(&memory).unwrap();
        save(&memory, &layout, &file, &ID, &|| false).unwrap();
        let zone = tempfile::NamedTempFile::new().unwrap();
        zone.as_file().set_len(9 * MIB).unwrap();
        zone.as_file().write_all_at(&[0xee; 4 << 20], MIB).unwrap();
        let part = |address, len: u64, offset| {
            let file = vm_memory::FileOffset::new(zone.reopen().unwrap(), offset);
            (GuestAddress(address), len as usize, Some(file))
        };
        let parts = [part(0, 5 * MIB + 4096, 0), part(1 << 32, 3 * MIB, 5 * MIB + 4096)];
        let other = GuestMap::from_ranges_with_files(parts).unwrap();
        assert!(load(&file, &layout, &other, &|| false).unwrap() >= 4 << 20);
        assert!(bytes(&memory) == bytes(&other));
        assert_eq!(load(&file, &layout, &other, &|| false).unwrap(), 0, "nothing differs");
    }

    #[test]
    fn image_truncated_after_its_check_is_an_error_not_zeros() {
        let (file, memory) = (tempfile::tempfile().unwrap(), filled());
        let layout = ImageLayout::of_memory(&memory).unwrap();
        save(&memory, &layout, &file, &ID, &|| false).unwrap();
        for len in [layout.trailer(), layout.regions[1].offset, MIB, 0] {
            file.set_len(len).unwrap();
            let read = load(&file, &layout, &self::memory(), &|| false);
            assert_eq!(read.unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{len}");
        }
    }

    #[test]
    fn another_file_is_known_by_its_length_or_its_end() {
        let (file, memory) = (tempfile::tempfile().unwrap(), filled());
        let layout = ImageLayout::of_memory(&memory).unwrap();
        save(&memory, &layout, &file, &ID, &|| false).unwrap();
        assert_eq!(check(&file, &layout, &[8; 16]), Err("the memory of another snapshot".to_string()));
        for len in [0, layout.trailer(), layout.file_size - 1, layout.file_size + 1] {
            file.set_len(len).unwrap();
            assert!(check(&file, &layout, &ID).unwrap_err().starts_with(&format!("{len} bytes long")), "{len}");
        }
        assert!(check(&File::open("/").unwrap(), &layout, &ID).is_err());
    }
}
