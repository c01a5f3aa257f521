//! The layers stay apart: `pci` depends only on the standard, KVM is behind one file, and the files of a crate import
//! each other in one direction.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "layering/imports.rs"]
mod imports;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use imports::{Crate, circle, parts, rooms};

/// The roots of crates whose files import each other in one direction.
const CRATES: [&str; 9] = [
    "machine/src/lib.rs",
    "pci/src/lib.rs",
    "vfctl/src/lib.rs",
    "virtio-devices/src/lib.rs",
    "virtio-sriov-cni/src/lib.rs",
    "vm-api/src/lib.rs",
    "vmm/src/lib.rs",
    "x550/src/lib.rs",
    "xtask/src/main.rs",
];
/// The roots of crates whose top-level modules, each with its child modules, also do so.
const LAYERED: [&str; 4] = ["virtio-devices/src/lib.rs", "machine/src/lib.rs", "vmm/src/lib.rs", "xtask/src/main.rs"];
/// The crates whose root has a table of their modules, from the top down.
const TABLES: [&str; 2] = ["machine/src/lib.rs", "vmm/src/lib.rs"];
/// The packages of the program.
const OURS: [&str; 10] = [
    "pci",
    "option-derive",
    "virtio-devices",
    "virtio-sriov-cni",
    "vfctl",
    "vm-api",
    "machine",
    "vmm",
    "x550",
    "cloud-hypervisor",
];

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

/// All Rust files and manifests under `folder`, without build output.
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
fn x550_depends_on_nothing_but_its_allow_list() {
    assert_eq!(keys("x550/Cargo.toml", "[dependencies]"), ["pci", "serde", "thiserror"]);
}

#[test]
fn pure_crates_forbid_unsafe_code() {
    for lib in ["pci/src/lib.rs", "x550/src/lib.rs"] {
        let text = fs::read_to_string(root().join(lib)).unwrap();
        assert!(text.contains("#![forbid(unsafe_code)]"), "{lib}");
    }
}

#[test]
fn dependencies_point_downward() {
    let ours = |manifest| {
        let mut ours = keys(manifest, "[dependencies]");
        ours.retain(|key| OURS.contains(&key.as_str()));
        ours
    };
    assert_eq!(ours("option-derive/Cargo.toml"), [""; 0]);
    assert_eq!(ours("vm-api/Cargo.toml"), ["option-derive"]);
    assert_eq!(ours("pci/Cargo.toml"), [""; 0]);
    assert_eq!(ours("virtio-devices/Cargo.toml"), ["pci", "x550"]);
    assert_eq!(ours("x550/Cargo.toml"), ["pci"]);
    assert_eq!(ours("machine/Cargo.toml"), ["pci", "virtio-devices", "vm-api"]);
    assert_eq!(ours("vfctl/Cargo.toml"), ["vm-api"]);
    assert_eq!(ours("virtio-sriov-cni/Cargo.toml"), ["vfctl", "vm-api"]);
    assert_eq!(ours("vmm/Cargo.toml"), ["machine", "pci", "virtio-devices", "vm-api"]);
}

/// A dependency that no file uses is not linked.
#[test]
fn the_client_does_not_link_the_vmm() {
    let mut files = vec![root().join("src/bin/ch-remote.rs"), root().join("src/vm_options.rs")];
    sources(&root().join("src/remote"), &mut files);
    assert!(files.len() > 5, "{files:?}");
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for crate_name in ["vmm::", "machine::", "virtio_devices", "pci::", "kvm"] {
            assert!(!text.contains(crate_name), "{} names {crate_name}", file.display());
        }
    }
}

#[test]
fn the_crate_shared_by_client_and_vmm_opens_nothing() {
    let expected = ["option-derive", "serde", "serde_json", "serde_path_to_error", "thiserror"];
    assert_eq!(keys("vm-api/Cargo.toml", "[dependencies]"), expected);
}

#[test]
fn only_one_file_names_kvm_ioctls() {
    let expected = ["Cargo.toml", "machine/Cargo.toml", "machine/src/kvm.rs"].map(PathBuf::from);
    let crate_name = naming(&["kvm", "ioctls"].join("-"));
    let path_name = naming(&["kvm", "ioctls::"].join("_"));
    assert!(crate_name.iter().all(|path| expected.contains(path)), "{crate_name:?}");
    assert_eq!(path_name, [PathBuf::from("machine/src/kvm.rs")]);
}

#[test]
fn virtio_devices_knows_neither_kvm_nor_http() {
    let allowed = |key: &String| !["kvm-bindings", "kvm-ioctls", "hyper", "acpi_tables"].contains(&key.as_str());
    assert!(keys("virtio-devices/Cargo.toml", "[dependencies]").iter().all(allowed));
}

/// The files that a kind of device which clients can add is named in, other than its own.
const SHARED_BY_KINDS: [&str; 9] = [
    "virtio-devices/src/lib.rs",
    "virtio-devices/src/memory_devices.rs",
    "vm-api/src/config/kinds.rs",
    "vm-api/src/config/virtio.rs",
    "vm-api/src/config.rs",
    "vmm/src/config/device.rs",
    "vmm/src/config/plan.rs",
    "vmm/src/config/virtio.rs",
    "vmm/src/devices/kind.rs",
];

#[test]
fn a_kind_of_device_is_named_in_few_files_beside_its_own() {
    let mut files = Vec::new();
    for folder in ["src", "machine/src", "pci/src", "virtio-devices/src", "vm-api/src", "vmm/src"] {
        sources(&root().join(folder), &mut files);
    }
    let is_own = |path: &Path| path.iter().any(|part| part == "pmem" || part == "pmem.rs");
    let is_test =
        |path: &Path| path.iter().any(|part| part.to_string_lossy().trim_end_matches(".rs").ends_with("tests"));
    let names_it = |path: &Path| {
        let text = fs::read_to_string(path).unwrap().to_lowercase();
        text.split("#[cfg(test)]\nmod tests {").next().is_some_and(|code| code.contains("pmem"))
    };
    let of_others = files.iter().map(|path| path.strip_prefix(root()).unwrap()).filter(|path| !is_own(path));
    let mut shared: Vec<_> = of_others.filter(|path| !is_test(path) && names_it(&root().join(path))).collect();
    // The names of all types of the standard, for backends in other processes.
    shared.retain(|path| *path != Path::new("vm-api/src/config/virtio/generic_vhost_user.rs"));
    shared.sort();
    assert_eq!(shared, SHARED_BY_KINDS.map(Path::new));
}

fn imports_of(lib: &str) -> BTreeMap<String, BTreeSet<String>> {
    Crate::read(&root().join(lib)).imports()
}

#[test]
fn no_file_of_a_crate_imports_one_that_imports_it() {
    for lib in CRATES {
        let imports = imports_of(lib);
        assert!(imports.len() > 7, "{lib} has more files than {imports:?}");
        assert_eq!(circle(&imports), None, "{lib}");
    }
}

#[test]
fn no_room_of_a_crate_imports_one_that_imports_it() {
    let devices = rooms(&imports_of(LAYERED[0]));
    for (upper, lower) in [("net", "backend"), ("net", "frames"), ("backend", "frames")] {
        assert!(devices[upper].contains(lower), "{upper} imports {lower}");
    }
    for lib in LAYERED {
        assert_eq!(circle(&rooms(&imports_of(lib))), None, "{lib}");
    }
}

#[test]
fn no_part_of_a_module_imports_one_that_imports_it() {
    let mut seen = 0;
    for lib in CRATES {
        let imports = imports_of(lib);
        for parent in imports.keys() {
            let parts = parts(&imports, parent);
            seen += usize::from(parts.len() > 2);
            assert_eq!(circle(&parts), None, "{lib}: {parent}");
        }
    }
    assert!(seen > 20, "only {seen} modules have parts");
}

#[test]
fn the_rooms_of_a_crate_use_only_those_below_them_in_its_table() {
    for lib in TABLES {
        let rooms = rooms(&imports_of(lib));
        let text = fs::read_to_string(root().join(lib)).unwrap();
        let rows = text.lines().filter_map(|line| line.strip_prefix("//! | `")?.split('`').next());
        let table: Vec<_> = rows.collect();
        let mut sorted = table.clone();
        sorted.sort_unstable();
        let all: Vec<_> = rooms.keys().filter(|room| *room != "lib").collect();
        assert_eq!(sorted, all, "the table of {lib} has each room once");
        for (place, room) in table.iter().enumerate() {
            for lower in &rooms[*room] {
                assert!(
                    table[place + 1..].contains(&lower.as_str()),
                    "{lib}: {room} imports {lower}, which is above it"
                );
            }
        }
    }
}

#[test]
fn an_import_is_found_whatever_way_it_is_written() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("imports");
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let modules = "mod a;\nmod b;\nmod c;\nmod d;\n#[path = \"named.rs\"]\nmod e;\n";
    write("lib.rs", &format!("{modules}use other_crate::kvm;\npub use b::{{B, part::Part}};\n"));
    write("a.rs", "use crate::{\n    Part, // crate::c\n};\n#[cfg(test)]\nmod tests {\n    use crate::c::C;\n}\n");
    write("b.rs", "mod part;\nmod other;\npub use part::Part;\npub use other::Other;\nstruct B(Other);\n");
    write("b/part.rs", "fn f() -> super::super::c::C { crate::d::D }\n");
    write("b/other.rs", "pub struct Other;\n");
    write("c.rs", "pub struct C;\n#[cfg(test)]\nuse crate::a::A;\n");
    write("d.rs", "use super::B as Bee;\nuse crate::kvm::Vm;\n");
    write("named.rs", "use crate::c::C;\n");
    let imports = Crate::read(&folder.join("lib.rs")).imports();
    let of = |module: &str| imports[module].iter().map(String::as_str).collect::<Vec<_>>();
    assert_eq!(of("a"), ["b::part"]);
    assert_eq!(of("b"), ["b::other"]);
    assert_eq!(of("b::part"), ["c", "d"]);
    assert_eq!(of("c"), [""; 0]);
    assert_eq!(of("d"), ["b"]);
    assert_eq!(of("e"), ["c"]);
    assert_eq!(circle(&imports), None);
    assert_eq!(circle(&rooms(&imports)), Some(vec!["b".into(), "d".into()]));
    assert_eq!(circle(&parts(&imports, "b")), None);
}

#[test]
fn a_circle_of_parts_is_found_below_a_room() {
    let set = |names: &[&str]| names.iter().map(|name| String::from(*name)).collect::<BTreeSet<_>>();
    let imports = [("a", &[][..]), ("a::b", &["a::c::e"][..]), ("a::c", &["a::b"][..]), ("a::c::e", &[][..])];
    let imports = imports.iter().map(|(module, targets)| (String::from(*module), set(targets))).collect();
    assert_eq!(circle(&imports), None);
    assert_eq!(circle(&parts(&imports, "a")), Some(vec!["b".into(), "c".into()]));
}
