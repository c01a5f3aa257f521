//! The layers stay apart: `pci` knows nothing but the standard, and KVM is behind one file.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The keys of a section of a manifest.
fn keys(manifest: &str, section: &str) -> Vec<String> {
    let text = fs::read_to_string(root().join(manifest)).unwrap();
    let lines = text.lines().skip_while(|line| *line != section).skip(1).take_while(|line| !line.starts_with('['));
    let mut keys: Vec<_> = lines
        .filter_map(|line| line.split(['.', ' ', '=']).next())
        .filter(|key| !key.is_empty())
        .map(str::to_string)
        .collect();
    keys.sort();
    keys
}

/// All Rust files and manifests under `folder`, without what builds leave.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            sources(&path, found);
        } else if name.ends_with(".rs") || name == "Cargo.toml" {
            found.push(path);
        }
    }
}

fn naming(text: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    sources(root(), &mut files);
    let mut naming: Vec<_> = files
        .into_iter()
        .filter(|path| path != &root().join(file!()) && fs::read_to_string(path).unwrap().contains(text))
        .map(|path| path.strip_prefix(root()).unwrap().to_path_buf())
        .collect();
    naming.sort();
    naming
}

#[test]
fn pci_depends_on_nothing_but_its_allow_list() {
    assert_eq!(keys("pci/Cargo.toml", "[dependencies]"), ["serde", "thiserror"]);
}

#[test]
fn pci_forbids_unsafe_code() {
    let lib = fs::read_to_string(root().join("pci/src/lib.rs")).unwrap();
    assert!(lib.contains("#![forbid(unsafe_code)]"));
}

#[test]
fn dependencies_point_downward() {
    let ours = |manifest| {
        let mut ours = keys(manifest, "[dependencies]");
        ours.retain(|key| ["pci", "virtio-devices", "vmm", "cloud-hypervisor"].contains(&key.as_str()));
        ours
    };
    assert_eq!(ours("pci/Cargo.toml"), [""; 0]);
    assert_eq!(ours("virtio-devices/Cargo.toml"), ["pci"]);
    assert_eq!(ours("vmm/Cargo.toml"), ["pci", "virtio-devices"]);
}

#[test]
fn only_one_file_names_kvm_ioctls() {
    let expected = ["Cargo.toml", "vmm/Cargo.toml", "vmm/src/kvm.rs"].map(PathBuf::from);
    let crate_name = naming(&["kvm", "ioctls"].join("-"));
    let path_name = naming(&["kvm", "ioctls::"].join("_"));
    assert!(crate_name.iter().all(|path| expected.contains(path)), "{crate_name:?}");
    assert_eq!(path_name, [PathBuf::from("vmm/src/kvm.rs")]);
}

#[test]
fn virtio_devices_knows_neither_kvm_nor_http() {
    let allowed = |key: &String| !["kvm-bindings", "kvm-ioctls", "hyper", "acpi_tables"].contains(&key.as_str());
    assert!(keys("virtio-devices/Cargo.toml", "[dependencies]").iter().all(allowed));
}
