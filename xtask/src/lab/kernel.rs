//! The contents of a kernel package: the ELF image in a bzImage, and modules in load order.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::error::{Context, Error, Result};

/// Offsets in the setup header (Linux `Documentation/arch/x86/boot.rst`).
const SETUP_SECTS: usize = 0x1f1;
const HEADER_MAGIC: usize = 0x202;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;

/// The ELF kernel that a bzImage carries compressed.
pub(crate) fn vmlinux_of(bzimage: &[u8]) -> Result<Vec<u8>> {
    let not_bzimage = || Error::new("the kernel package's image is not a bzImage");
    if bzimage.get(HEADER_MAGIC..HEADER_MAGIC + 4) != Some(b"HdrS") {
        return Err(not_bzimage());
    }
    let word = |at: usize| -> Result<usize> {
        let bytes = bzimage.get(at..at + 4).and_then(|b| b.try_into().ok()).ok_or_else(not_bzimage)?;
        Ok(u32::from_le_bytes(bytes) as usize)
    };
    // 0 setup sectors means 4, for compatibility with very old boot loaders.
    let sectors = bzimage.get(SETUP_SECTS).map_or(4, |&n| if n == 0 { 4 } else { usize::from(n) });
    let start = (sectors + 1) * 512 + word(PAYLOAD_OFFSET)?;
    let payload = bzimage.get(start..start + word(PAYLOAD_LENGTH)?).ok_or_else(not_bzimage)?;
    let elf = decompress(payload)?;
    if !elf.starts_with(b"\x7fELF") {
        return Err(Error::new("the payload of the kernel package's bzImage is not an ELF file"));
    }
    Ok(elf)
}

/// Decompresses a kernel payload. The kernel's build appends the uncompressed size in 4 bytes, which are not part of
/// any format.
fn decompress(payload: &[u8]) -> Result<Vec<u8>> {
    let body = &payload[..payload.len().saturating_sub(4)];
    match payload {
        [0x02, 0x21, 0x4c, 0x18, ..] => lz4_legacy(&body[4..]),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            let mut out = Vec::new();
            let mut decoder =
                ruzstd::decoding::StreamingDecoder::new(body).context("unpacking the kernel's zstd payload")?;
            decoder.read_to_end(&mut out).context("unpacking the kernel's zstd payload")?;
            Ok(out)
        }
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => xz(body),
        _ => Err(Error::new("the kernel's payload is compressed by none of LZ4, zstd and xz")),
    }
}

/// Decompresses the legacy LZ4 frame of the kernel's build: blocks of up to 8 MiB, each after its compressed length.
fn lz4_legacy(mut body: &[u8]) -> Result<Vec<u8>> {
    const BLOCK: usize = 8 << 20;
    let mut out = Vec::new();
    while let Some((length, rest)) = body.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        let block = rest.get(..length).ok_or_else(|| Error::new("the kernel's LZ4 payload is cut short"))?;
        out.extend(lz4_flex::block::decompress(block, BLOCK).context("unpacking the kernel's LZ4 payload")?);
        body = &rest[length..];
    }
    Ok(out)
}

fn xz(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    lzma_rust2::XzReader::new(bytes, false).read_to_end(&mut out).context("unpacking an xz file")?;
    Ok(out)
}

/// A module, uncompressed and ready for `insmod`.
#[derive(Debug)]
pub(crate) struct Module {
    /// Name with underscores, as the kernel spells it.
    pub name: String,
    /// The ELF file.
    pub image: Vec<u8>,
}

/// The modules below one `lib/modules/<version>` folder.
pub(crate) struct ModuleTree {
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
}

impl ModuleTree {
    /// Finds the modules below `root`.
    pub(crate) fn open(root: &Path) -> Result<ModuleTree> {
        let mut files = BTreeMap::new();
        collect(&root.join("kernel"), &mut files).context(format!("reading {}", root.display()))?;
        let list = fs::read_to_string(root.join("modules.builtin")).context("reading modules.builtin")?;
        let builtin = list.lines().filter_map(|line| module_name(Path::new(line))).collect();
        Ok(ModuleTree { files, builtin })
    }

    /// `wanted` and their dependencies, each after its dependencies. Built-in modules are left out.
    pub(crate) fn load_order(&self, wanted: &[&str]) -> Result<Vec<Module>> {
        let mut order = Vec::new();
        for name in wanted {
            self.visit(&canonical(name), &mut order)?;
        }
        Ok(order)
    }

    fn visit(&self, name: &str, order: &mut Vec<Module>) -> Result<()> {
        if self.builtin.contains(name) || order.iter().any(|module| module.name == name) {
            return Ok(());
        }
        let path =
            self.files.get(name).ok_or_else(|| Error::new(format!("the kernel package has no module {name}")))?;
        let mut image = fs::read(path).context(format!("reading {}", path.display()))?;
        if path.extension().is_some_and(|e| e == "xz") {
            image = xz(&image)?;
        }
        for dependency in dependencies(&image) {
            self.visit(&dependency, order)?;
        }
        order.push(Module { name: name.to_owned(), image });
        Ok(())
    }
}

fn collect(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if let Some(name) = module_name(&path) {
            files.insert(name, path);
        }
    }
    Ok(())
}

/// `kernel/virt/lib/kvm-amd.ko.xz` is the module `kvm_amd`.
fn module_name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let stem = file.strip_suffix(".ko").or_else(|| file.strip_suffix(".ko.xz"))?;
    Some(canonical(stem))
}

fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

/// The names in a module's `depends=` entry. `.modinfo` is a list of NUL-terminated `key=value` strings.
fn dependencies(image: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = image.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let value = image[at + KEY.len()..].split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(value).split(',').filter(|name| !name.is_empty()).map(canonical).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(modules: &[(&str, &str)], builtin: &str) -> (tempfile::TempDir, ModuleTree) {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("kernel/net")).unwrap();
        for (name, depends) in modules {
            let image = format!("ELF\0license=GPL\0depends={depends}\0name={name}\0");
            fs::write(root.path().join(format!("kernel/net/{name}.ko")), image).unwrap();
        }
        fs::write(root.path().join("modules.builtin"), builtin).unwrap();
        let tree = ModuleTree::open(root.path()).unwrap();
        (root, tree)
    }

    #[test]
    fn a_module_loads_after_what_it_depends_on_and_only_once() {
        let (_root, tree) = tree(
            &[("virtio_net", "net_failover,virtio"), ("net-failover", "failover"), ("failover", ""), ("virtio", "")],
            "",
        );
        let names: Vec<_> =
            tree.load_order(&["virtio", "virtio_net"]).unwrap().into_iter().map(|module| module.name).collect();
        assert_eq!(names, ["virtio", "failover", "net_failover", "virtio_net"]);
    }

    #[test]
    fn a_built_in_module_is_left_out_and_an_unknown_one_is_an_error() {
        let (_root, tree) = tree(&[("virtio_net", "virtio")], "kernel/drivers/virtio/virtio.ko\n");
        assert_eq!(tree.load_order(&["virtio_net"]).unwrap().len(), 1);
        assert!(tree.load_order(&["igb"]).unwrap_err().to_string().contains("igb"));
    }

    #[test]
    fn a_file_that_is_no_bzimage_is_refused() {
        assert!(vmlinux_of(&[0; 4096]).is_err());
        assert!(vmlinux_of(b"").is_err());
    }

    #[test]
    fn legacy_lz4_blocks_follow_their_length() {
        // One literal-only block: token 0x50, five literals.
        let block = [0x50, b'h', b'e', b'l', b'l', b'o'];
        let mut body = (block.len() as u32).to_le_bytes().to_vec();
        body.extend_from_slice(&block);
        assert_eq!(lz4_legacy(&body).unwrap(), b"hello");
        assert!(lz4_legacy(&body[..7]).is_err(), "a cut block");
    }
}
