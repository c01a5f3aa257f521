//! The header of a qcow2 image, checked before any other use of the image.
//!
//! Images are untrusted. Sizes in the header are bounded here, because tables of these sizes are read into memory when
//! the image is opened. The format is that of QEMU's `docs/interop/qcow2.txt`.

use std::path::Path;

use crate::block::error::BlockError;

/// First bytes of an image.
pub(crate) const MAGIC: &[u8; 4] = b"QFI\xfb";
/// Bytes read from the beginning of an image: its header, the header extensions, and the backing file's name.
pub(crate) const HEAD: usize = 64 << 10;
/// The length of a version 2 header, and the minimum of version 3.
const V2_LEN: usize = 72;
const V3_LEN: usize = 104;
/// The width of a version 2 reference count, as a power of two.
const V2_REFCOUNT_ORDER: u32 = 4;
/// The largest L1 table and refcount table in bytes, as in QEMU.
const MAX_L1: u64 = 32 << 20;
const MAX_REFCOUNT_TABLE: u64 = 8 << 20;
/// Limits of the L2 cache: the number of tables, and their bytes.
const CACHED_L2: u64 = 128;
const MAX_L2_CACHE: u64 = 64 << 20;
/// More extensions than any program writes.
const MAX_EXTENSIONS: usize = 64;
/// The bits of a refcount table entry that hold the block's offset.
pub(crate) const REFCOUNT_BLOCK: u64 = !511;
/// The longest name of a backing file in bytes.
const MAX_NAME: usize = 1023;
/// The extension that names the backing file's format.
const BACKING_FORMAT: u32 = 0xe279_2aca;

/// Incompatible features that are not supported: the bit, and the name.
const INCOMPATIBLE: [(u32, &str); 5] = [
    (0, "was not closed; repair it: qemu-img check -r all"),
    (1, "is marked as corrupt; repair it: qemu-img check -r all"),
    (2, "keeps its data in another file, which is not supported yet; convert it: qemu-img convert -O qcow2"),
    (3, "is compressed by zstd, which is not supported yet; convert it: qemu-img convert -O qcow2"),
    (4, "has extended L2 entries, which are not supported yet; convert it: qemu-img convert -O qcow2"),
];

/// Values of a header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    /// The size of the disk in bytes, a multiple of 512.
    pub size: u64,
    /// The size of a cluster in bytes, a power of two from 512 to 2 MiB.
    pub cluster: u32,
    /// True if clusters can be marked as zero.
    pub has_zero_clusters: bool,
    /// The places of the tables.
    pub tables: Tables,
    /// The number of snapshots in the image.
    pub snapshots: u32,
    /// The name of the backing file, and its format.
    pub backing: Option<(String, Option<String>)>,
}

/// The tables of an image. Offsets are in bytes, and multiples of the cluster size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tables {
    /// Offset of the L1 table.
    pub l1: u64,
    /// Number of entries of the L1 table.
    pub l1_entries: u64,
    /// Offset of the refcount table.
    pub refcounts: u64,
    /// Number of entries of the refcount table.
    pub refcount_entries: u64,
    /// The width of a reference count in bits, as a power of two.
    pub refcount_order: u32,
}

impl Header {
    /// Reads the header of the image at `path`, which begins with `head`: its first [`HEAD`] bytes, or all of a shorter
    /// file.
    ///
    /// # Errors
    ///
    /// Fails with the fault, or with the unsupported feature.
    pub(crate) fn parse(path: &Path, head: &[u8]) -> Result<Self, BlockError> {
        parse(head).map_err(|what| BlockError::Qcow2 { path: path.into(), what })
    }

    /// Checks the refcount table of an image in a file of `end` bytes. The first clusters, which include this header,
    /// must have a refcount block: without one, imago 0.2 would allocate the block over the header, treat that offset
    /// as none, and loop forever. Blocks lie in the file, and no two entries share one, so that the file's size bounds
    /// a search for free clusters.
    ///
    /// # Errors
    ///
    /// An entry has no block of its own.
    pub(crate) fn check_refcounts(&self, path: &Path, table: &[u8], end: u64) -> Result<(), BlockError> {
        let entry = |bytes: &[u8]| bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)) & REFCOUNT_BLOCK;
        let mut blocks: Vec<u64> = table.chunks_exact(8).map(entry).collect();
        let has_first = blocks.first().is_some_and(|block| *block != 0);
        blocks.retain(|block| *block != 0);
        let lies = |block: &u64| block.is_multiple_of(self.cluster.into()) && *block < end;
        blocks.sort_unstable();
        if has_first && blocks.iter().all(lies) && blocks.windows(2).all(|pair| pair[0] != pair[1]) {
            return Ok(());
        }
        Err(BlockError::Qcow2 { path: path.into(), what: damaged("its refcount table") })
    }
}

fn parse(head: &[u8]) -> Result<Header, String> {
    let field = Fields(head);
    if !head.starts_with(MAGIC) {
        return Err("is not a qcow2 image; give its true image_type".to_string());
    }
    let version = field.u32(4)?;
    if !(2..=3).contains(&version) {
        return Err(format!("has version {version} of the format; convert it: qemu-img convert -O qcow2"));
    }
    let bits = field.u32(20)?;
    if !(9..=21).contains(&bits) {
        return Err(damaged("the size of its clusters"));
    }
    let header_len = if version == 2 { V2_LEN } else { header_len(&field, bits)? };
    let mut refcount_order = V2_REFCOUNT_ORDER;
    if version == 3 {
        check_features(field.u64(72)?)?;
        refcount_order = field.u32(96)?;
        if refcount_order > 6 {
            return Err(damaged("the width of its reference counts"));
        }
    }
    if field.u32(32)? != 0 {
        return Err("is encrypted, which is not supported yet; decrypt it: qemu-img convert -O qcow2".to_string());
    }
    let size = field.u64(24)?;
    if size == 0 || !size.is_multiple_of(512) || i64::try_from(size).is_err() {
        return Err(format!("describes a disk of {size} bytes; give it whole sectors: qemu-img resize"));
    }
    check_tables(&field, size, bits)?;
    let format = extension(&field, header_len)?;
    let backing = backing_name(&field)?.map(|name| (name, format));
    let tables = Tables {
        l1: field.u64(40)?,
        l1_entries: field.u32(36)?.into(),
        refcounts: field.u64(48)?,
        refcount_entries: (u64::from(field.u32(56)?) << bits) >> 3,
        refcount_order,
    };
    let snapshots = field.u32(60)?;
    Ok(Header { size, cluster: 1 << bits, has_zero_clusters: version == 3, tables, snapshots, backing })
}

/// The number of L1 entries that a disk of `size` bytes needs; `None` if the cluster size does not allow such a disk,
/// or the table takes too much memory.
pub(crate) fn l1_entries(size: u64, cluster: u32) -> Option<u64> {
    let needed = needed(size, cluster.into());
    (needed * 8 <= MAX_L1 && !takes_too_much(needed, cluster.into())).then_some(needed)
}

/// An L2 table is one cluster of 8-byte entries, and each has one L1 entry.
fn needed(size: u64, cluster: u64) -> u64 {
    size.div_ceil(cluster * (cluster / 8))
}

fn takes_too_much(l2_tables: u64, cluster: u64) -> bool {
    l2_tables.min(CACHED_L2) * cluster > MAX_L2_CACHE
}

fn damaged(what: &str) -> String {
    format!("is damaged: {what} makes no sense; look at it with qemu-img check")
}

fn header_len(field: &Fields<'_>, bits: u32) -> Result<usize, String> {
    let len = usize::try_from(field.u32(100)?).ok();
    len.filter(|len| (V3_LEN..=1 << bits).contains(len) && len.is_multiple_of(8)).ok_or_else(|| damaged("its header"))
}

fn check_features(features: u64) -> Result<(), String> {
    for (bit, what) in INCOMPATIBLE {
        if features & 1 << bit != 0 {
            return Err(what.to_string());
        }
    }
    match features {
        0 => Ok(()),
        other => {
            Err(format!("has features {other:#x}, which are not known here; convert it: qemu-img convert -O qcow2"))
        }
    }
}

/// Checks that the tables fit the disk's size, and the limits of memory.
fn check_tables(field: &Fields<'_>, size: u64, bits: u32) -> Result<(), String> {
    let cluster = 1u64 << bits;
    let needed = needed(size, cluster);
    let l1 = u64::from(field.u32(36)?);
    if l1 < needed || l1 * 8 > MAX_L1 || !field.u64(40)?.is_multiple_of(cluster) || field.u64(40)? == 0 {
        return Err(damaged("its L1 table"));
    }
    if takes_too_much(needed, cluster) {
        return Err(format!(
            "describes a disk of {size} bytes in clusters of {cluster}, which takes too much memory; convert it: \
             qemu-img convert -O qcow2 -o cluster_size=64K"
        ));
    }
    let refcounts = u64::from(field.u32(56)?);
    if refcounts == 0 || refcounts * cluster > MAX_REFCOUNT_TABLE || !field.u64(48)?.is_multiple_of(cluster) {
        return Err(damaged("its refcount table"));
    }
    Ok(())
}

/// The format of the backing file, from the header's extensions.
fn extension(field: &Fields<'_>, header_len: usize) -> Result<Option<String>, String> {
    let (mut offset, mut format) = (header_len, None);
    for _ in 0..MAX_EXTENSIONS {
        // A truncated extension ends the list: a version 2 header may end with the file.
        let (Ok(kind), Ok(len)) = (field.u32(offset), field.u32(offset + 4)) else { return Ok(format) };
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        match kind {
            0 => return Ok(format),
            BACKING_FORMAT => format = Some(field.text(offset + 8, len)?),
            _ => {}
        }
        offset = len
            .checked_next_multiple_of(8)
            .and_then(|len| len.checked_add(offset + 8))
            .filter(|end| *end <= HEAD)
            .ok_or_else(|| damaged("the length of its header"))?;
    }
    Err(damaged("the number of its header's extensions"))
}

fn backing_name(field: &Fields<'_>) -> Result<Option<String>, String> {
    let (offset, len) = (field.u64(8)?, field.u32(16)?);
    if offset == 0 {
        return Ok(None);
    }
    match (usize::try_from(offset), usize::try_from(len)) {
        (Ok(offset), Ok(len)) if (1..=MAX_NAME).contains(&len) => field.text(offset, len).map(Some),
        _ => Err(damaged("the name of its backing file")),
    }
}

/// The bytes of a header, in big-endian fields.
struct Fields<'h>(&'h [u8]);

impl Fields<'_> {
    fn bytes(&self, offset: usize, len: usize) -> Result<&[u8], String> {
        let end = offset.checked_add(len);
        end.and_then(|end| self.0.get(offset..end)).ok_or_else(|| damaged("its header, which is cut off,"))
    }

    fn u32(&self, offset: usize) -> Result<u32, String> {
        Ok(self.bytes(offset, 4)?.iter().fold(0, |value, byte| value << 8 | u32::from(*byte)))
    }

    fn u64(&self, offset: usize) -> Result<u64, String> {
        Ok(self.bytes(offset, 8)?.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    fn text(&self, offset: usize, len: usize) -> Result<String, String> {
        let text = std::str::from_utf8(self.bytes(offset, len)?).ok();
        text.filter(|text| !text.contains('\0')).map(str::to_string).ok_or_else(|| damaged("a name in its header"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header of a disk of 1 GiB in clusters of 64 KiB, with these fields changed.
    fn head(changes: &[(usize, &[u8])]) -> Vec<u8> {
        let mut head = vec![0; HEAD];
        let fields: [(usize, &[u8]); 11] = [
            (0, MAGIC),
            (4, &3u32.to_be_bytes()),
            (20, &16u32.to_be_bytes()),
            (24, &(1u64 << 30).to_be_bytes()),
            (36, &2u32.to_be_bytes()),
            (40, &0x3_0000u64.to_be_bytes()),
            (48, &0x1_0000u64.to_be_bytes()),
            (56, &1u32.to_be_bytes()),
            (72, &0u64.to_be_bytes()),
            (96, &4u32.to_be_bytes()),
            (100, &104u32.to_be_bytes()),
        ];
        for (offset, bytes) in fields.iter().chain(changes) {
            head[*offset..*offset + bytes.len()].copy_from_slice(bytes);
        }
        head
    }

    #[test]
    fn a_header_has_the_shape_of_the_disk_and_its_backing_file() {
        let tables =
            Tables { l1: 3 << 16, l1_entries: 2, refcounts: 1 << 16, refcount_entries: 1 << 13, refcount_order: 4 };
        let (size, cluster) = (1 << 30, 1 << 16);
        let plain = Header { size, cluster, has_zero_clusters: true, tables, snapshots: 0, backing: None };
        assert_eq!(parse(&head(&[])), Ok(plain.clone()));
        let name: &[(usize, &[u8])] = &[(8, &200u64.to_be_bytes()), (16, &4u32.to_be_bytes()), (200, b"base")];
        let backing = |format: Option<&str>| Some(("base".to_string(), format.map(str::to_string)));
        assert_eq!(parse(&head(name)), Ok(Header { backing: backing(None), ..plain.clone() }));
        let format: &[(usize, &[u8])] = &[
            (104, &0x1234u32.to_be_bytes()),
            (108, &3u32.to_be_bytes()),
            (120, &BACKING_FORMAT.to_be_bytes()),
            (124, &3u32.to_be_bytes()),
            (128, b"raw"),
        ];
        let with_format = head(&[name, format].concat());
        assert_eq!(parse(&with_format), Ok(Header { backing: backing(Some("raw")), ..plain.clone() }));
        // A version 2 header ends before the fields of version 3, and has no features.
        let v2 = head(&[(4, &2u32.to_be_bytes()), (72, &[0; 32])]);
        assert_eq!(parse(&v2), Ok(Header { has_zero_clusters: false, ..plain }));
    }

    #[test]
    fn an_unsupported_feature_is_refused_by_name() {
        for (bit, what) in [(0, "-r all"), (1, "corrupt"), (2, "another file"), (3, "zstd"), (4, "extended L2")] {
            let error = parse(&head(&[(72, &(1u64 << bit).to_be_bytes())])).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
        assert!(parse(&head(&[(72, &(1u64 << 40).to_be_bytes())])).unwrap_err().contains("0x10000000000"));
        assert!(parse(&head(&[(32, &1u32.to_be_bytes())])).unwrap_err().contains("encrypted"));
        assert!(parse(&head(&[(4, &1u32.to_be_bytes())])).unwrap_err().contains("version 1"));
        assert!(parse(b"conectix").unwrap_err().contains("image_type"));
    }

    #[test]
    fn no_number_of_a_header_is_believed() {
        let (most, large) = (u64::MAX.to_be_bytes(), u32::MAX.to_be_bytes());
        for (offset, bytes) in [
            (8, &most[..]),
            (16, &large),
            (20, &large),
            (20, &8u32.to_be_bytes()),
            (20, &22u32.to_be_bytes()),
            (24, &most),
            (24, &0u64.to_be_bytes()),
            (24, &513u64.to_be_bytes()),
            (36, &large),
            (36, &1u32.to_be_bytes()),
            (40, &most),
            (48, &most),
            (56, &large),
            (56, &0u32.to_be_bytes()),
            (96, &7u32.to_be_bytes()),
            (100, &large),
            (100, &103u32.to_be_bytes()),
            (108, &large),
        ] {
            let changed = match offset {
                // These bytes are the offset or length of a name, or the length of an extension.
                8 => head(&[(16, &4u32.to_be_bytes()), (8, bytes)]),
                16 => head(&[(8, &200u64.to_be_bytes()), (16, bytes)]),
                108 => head(&[(104, &1u32.to_be_bytes()), (108, bytes)]),
                _ => head(&[(offset, bytes)]),
            };
            assert!(parse(&changed).is_err(), "{offset} {bytes:?}");
        }
        // 2 MiB of tables for each 512 GiB: a disk of 2 EiB would take 256 MiB.
        let huge = head(&[
            (20, &21u32.to_be_bytes()),
            (24, &(1u64 << 61).to_be_bytes()),
            (36, &(1u32 << 22).to_be_bytes()),
            (40, &(1u64 << 21).to_be_bytes()),
            (48, &(1u64 << 22).to_be_bytes()),
        ]);
        assert!(parse(&huge).unwrap_err().contains("too much memory"));
        for len in [0, 4, 71, 103] {
            assert!(parse(&head(&[])[..len]).is_err(), "{len}");
        }
    }

    #[test]
    fn a_disk_is_as_large_as_its_tables_can_be() {
        assert_eq!([1, 1 << 29, (1 << 29) + 1].map(|size| l1_entries(size, 1 << 16)), [Some(1), Some(1), Some(2)]);
        assert_eq!(l1_entries(2 << 50, 1 << 16), Some(4 << 20));
        assert_eq!(l1_entries((2 << 50) + 1, 1 << 16), None);
        assert_eq!([1 << 44, 1 << 45].map(|size| l1_entries(size, 1 << 21)), [Some(32), None]);
        assert_eq!(l1_entries(u64::MAX, 1 << 9), None);
    }

    #[test]
    fn extensions_without_end_are_refused() {
        let mut endless = head(&[]);
        endless[104..].chunks_exact_mut(8).for_each(|chunk| chunk[3] = 7);
        assert!(parse(&endless).unwrap_err().contains("extensions"));
    }
}
