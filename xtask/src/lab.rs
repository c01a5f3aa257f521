//! What the lab is made of, fetched once and kept under `target/lab`: kernels, their modules, and a small userland.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::apt::{self, Apt};
use crate::error::{Context, Error, Result};
use crate::images;
use crate::kernel::{Module, ModuleTree, vmlinux_of};
use crate::progress::Step;

/// A kernel of the lab, by the package it comes from.
struct Kernel {
    /// Its folder below `target/lab/kernels`.
    name: &'static str,
    /// The package that depends on the newest build of it.
    meta: &'static str,
    /// How the versions of it begin.
    series: &'static str,
    /// The modules that the lab loads, without what they depend on.
    modules: &'static [&'static str],
    /// The modules that tests may load, without what they depend on.
    extra: &'static [&'static str],
    /// The modules of networks of containers that are measured, without what they depend on.
    containers: &'static [&'static str],
}

/// What guests load when a test wants it: every guest would boot the longer for it.
const GUEST_EXTRA: &[&str] = &["virtio_blk", "virtio_console", "virtio_rng", "button", "evdev"];

/// What a first-level machine loads.
const FIRST_LEVEL: &[&str] = &["kvm-amd", "tun", "9pnet_virtio", "9p", "vhost_net", "vhost_vdpa", "vduse"];

/// What networks of containers are made of where there are no VFs.
const CONTAINERS: &[&str] = &["veth", "bridge", "vxlan", "nft_chain_nat", "nft_masq"];

/// The kernels that guests run, and the one that runs the guests in the nested lab: only Debian's generic kernels have
/// 9p, by which the first-level machine sees the checkout.
const KERNELS: [Kernel; 3] = [
    Kernel {
        name: "6.1",
        meta: "linux-image-cloud-amd64",
        series: "6.1.",
        modules: &["virtio_pci", "virtio_net"],
        extra: GUEST_EXTRA,
        containers: &[],
    },
    Kernel {
        name: "6.12",
        meta: "linux-image-cloud-amd64",
        series: "6.12.",
        modules: &["virtio_pci", "virtio_net"],
        extra: GUEST_EXTRA,
        containers: CONTAINERS,
    },
    Kernel {
        name: "first-level",
        meta: "linux-image-amd64",
        series: "6.12.",
        modules: FIRST_LEVEL,
        extra: &[],
        containers: &["vxlan"],
    },
];

/// The guest's userland: busybox, and the real `lspci` with what it is linked against.
const TOOLS: [&str; 11] = [
    "busybox-static",
    "pciutils",
    "pci.ids",
    "libpci3",
    "libkmod2",
    "libc6",
    "zlib1g",
    "libudev1",
    "libzstd1",
    "liblzma5",
    "libssl3",
];

/// Programs of others that serve NICs of guests, or make what serves them. The first-level machine has them in `PATH`.
const PEERS: [&str; 5] = ["passt", "dpdk-dev", "ibverbs-providers", "iproute2", "zlib1g"];

/// The folder `target/lab`, complete.
pub struct Lab {
    folder: PathBuf,
}

/// Modules in load order: file names and ELF images.
pub type Modules = BTreeMap<String, Vec<u8>>;

impl Lab {
    /// Fetches and builds what is missing. When nothing is, no network is needed and this takes a moment.
    pub fn prepare(workspace: &Path) -> Result<Lab> {
        let lab = Lab { folder: workspace.join("target/lab") };
        fs::create_dir_all(&lab.folder).context(format!("making {}", lab.folder.display()))?;
        let mut apt = None;
        for kernel in &KERNELS {
            lab.fetch_kernel(kernel, &mut apt)?;
        }
        lab.fetch_tools(&mut apt)?;
        lab.fetch_peers(&mut apt)?;
        images::build(&lab)?;
        Ok(lab)
    }

    /// `target/lab` itself.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A file of one of the kernels: `kernel("6.1", "vmlinux")`.
    pub fn kernel(&self, name: &str, file: &str) -> PathBuf {
        self.folder.join("kernels").join(name).join(file)
    }

    /// A file of the unpacked guest tools.
    pub fn tool(&self, path: &str) -> PathBuf {
        self.folder.join("tools").join(path)
    }

    /// The root of the programs of others.
    pub fn peers(&self) -> PathBuf {
        self.folder.join("peers")
    }

    /// An initramfs.
    pub fn image(&self, name: &str) -> PathBuf {
        self.folder.join("images").join(name)
    }

    /// The modules that guests of a kernel load at boot.
    pub fn modules(&self, kernel: &str) -> Result<Modules> {
        self.modules_in(kernel, "modules")
    }

    /// The modules that tests may load, each with all that it needs beyond what guests load at boot.
    pub fn extra_modules(&self, kernel: &str) -> Result<Vec<(&'static str, Modules)>> {
        let wanted = KERNELS.iter().filter(|known| known.name == kernel).flat_map(|known| known.extra);
        wanted.map(|&module| Ok((module, self.modules_in(kernel, &format!("extra/{module}"))?))).collect()
    }

    /// The modules of networks of containers, with all that they need beyond what is loaded at boot.
    pub fn container_modules(&self, kernel: &str) -> Result<Modules> {
        self.modules_in(kernel, "containers")
    }

    fn modules_in(&self, kernel: &str, folder: &str) -> Result<Modules> {
        let folder = self.kernel(kernel, folder);
        let mut modules = BTreeMap::new();
        for entry in fs::read_dir(&folder).context(folder.display())?.flatten() {
            let image = fs::read(entry.path()).context(entry.path().display())?;
            modules.insert(entry.file_name().to_string_lossy().into_owned(), image);
        }
        Ok(modules)
    }

    /// The packages that the lab was made of, a line each.
    pub fn versions(&self) -> String {
        let records = KERNELS
            .iter()
            .map(|kernel| self.kernel(kernel.name, "package"))
            .chain([self.tool("package"), self.peers().join("package")]);
        records.filter_map(|path| fs::read_to_string(path).ok()).collect()
    }

    fn fetch_kernel(&self, kernel: &Kernel, apt: &mut Option<Apt>) -> Result<()> {
        let wanted = [kernel.modules, kernel.extra, kernel.containers].concat().join(" ");
        let record = self.kernel(kernel.name, "package");
        let modules_record = self.kernel(kernel.name, "wanted-modules");
        if record.exists() && fs::read_to_string(&modules_record).is_ok_and(|have| have == wanted) {
            return Ok(());
        }
        let apt = self.apt(apt)?;
        let (package, version) = apt.resolve(kernel.meta, kernel.series)?;
        let unpacked = self.folder.join("unpacked");
        let _ = fs::remove_dir_all(&unpacked);
        let names = apt.unpack(&package, &[&format!("{package}={version}")], &unpacked)?;

        let step = Step::begin("unpack", format!("kernel {} and its modules", kernel.name));
        // The old folder may be in use until the new one is whole.
        let folder = self.kernel(&format!("{}.new", kernel.name), "");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).context(format!("making {}", folder.display()))?;
        let bzimage = read_one(&unpacked.join("boot"), "vmlinuz-")?;
        fs::write(folder.join("vmlinux"), vmlinux_of(&bzimage)?).context("writing vmlinux")?;
        fs::write(folder.join("bzImage"), bzimage).context("writing bzImage")?;
        let tree = ModuleTree::open(&modules_folder(&unpacked)?)?;
        let loaded = tree.load_order(kernel.modules)?;
        write_modules(&folder.join("modules"), loaded.iter())?;
        let write_missing = |folder: &Path, wanted: &[&str]| {
            let needed = tree.load_order(wanted)?;
            let missing = needed.iter().filter(|module| loaded.iter().all(|loaded| loaded.name != module.name));
            write_modules(folder, missing)
        };
        for extra in kernel.extra {
            write_missing(&folder.join("extra").join(extra), &[extra])?;
        }
        write_missing(&folder.join("containers"), kernel.containers)?;
        fs::write(folder.join("wanted-modules"), wanted).context("recording the kernel's modules")?;
        fs::write(folder.join("package"), names).context("recording the kernel's version")?;
        let place = self.kernel(kernel.name, "");
        let _ = fs::remove_dir_all(&place);
        fs::rename(&folder, &place).context(format!("making {}", place.display()))?;
        let _ = fs::remove_dir_all(&unpacked);
        step.done();
        Ok(())
    }

    /// Makes a kernel for first-level machines of an unpacked package, with `driver` besides the modules that they have anyway.
    pub fn unpack_kernel(&self, name: &str, unpacked: &Path, package: &str, driver: Option<&Path>) -> Result<()> {
        let _ = fs::remove_dir_all(self.kernel(name, ""));
        let modules = self.kernel(name, "modules");
        let tree = ModuleTree::open(&modules_folder(unpacked)?)?;
        write_modules(&modules, tree.load_order(FIRST_LEVEL)?.iter())?;
        if let Some(driver) = driver {
            let file = driver.file_name().unwrap_or_default().to_string_lossy();
            // Behind all others in load order.
            fs::copy(driver, modules.join(format!("99-{file}"))).context(driver.display())?;
        }
        let bzimage = read_one(&unpacked.join("boot"), "vmlinuz-")?;
        fs::write(self.kernel(name, "bzImage"), bzimage).context("writing bzImage")?;
        fs::write(self.kernel(name, "package"), package).context("recording the kernel's version")
    }

    fn fetch_tools(&self, apt: &mut Option<Apt>) -> Result<()> {
        let record = self.tool("package");
        if record.exists() {
            return Ok(());
        }
        let _ = fs::remove_dir_all(self.tool(""));
        let packages = TOOLS.map(|name| format!("{name}/{}", apt::RELEASE_6_1));
        let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
        let names = self.apt(apt)?.unpack("busybox, lspci and its libraries", &packages, &self.tool(""))?;
        fs::write(record, names).context("recording the versions of the tools")
    }

    fn fetch_peers(&self, apt: &mut Option<Apt>) -> Result<()> {
        let (record, wanted) = (self.peers().join("wanted"), PEERS.join(" "));
        if fs::read_to_string(&record).is_ok_and(|have| have == wanted) {
            return Ok(());
        }
        let _ = fs::remove_dir_all(self.peers());
        let apt = self.apt(apt)?;
        let packages = apt.with_libraries(&PEERS, apt::RELEASE_6_12)?;
        let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
        apt.unpack(&format!("{} and their libraries", PEERS.join(", ")), &packages, &self.peers())?;
        let versions =
            packages.iter().filter(|package| PEERS.iter().any(|peer| package.starts_with(&format!("{peer}="))));
        let versions: String = versions.map(|package| format!("{package}\n")).collect();
        fs::write(self.peers().join("package"), versions).context("recording the versions of the peers")?;
        fs::write(record, wanted).context("recording the peers")
    }

    fn apt<'a>(&self, apt: &'a mut Option<Apt>) -> Result<&'a mut Apt> {
        let ready = match apt.take() {
            Some(ready) => ready,
            None => Apt::new(&self.folder.join("apt"))?,
        };
        Ok(apt.insert(ready))
    }
}

/// Writes modules into a new folder, under names whose order is theirs.
fn write_modules<'a>(folder: &Path, modules: impl Iterator<Item = &'a Module>) -> Result<()> {
    fs::create_dir_all(folder).context(format!("making {}", folder.display()))?;
    for (number, module) in modules.enumerate() {
        let path = folder.join(format!("{number:02}-{}.ko", module.name));
        fs::write(&path, &module.image).context(path.display())?;
    }
    Ok(())
}

fn read_one(folder: &Path, prefix: &str) -> Result<Vec<u8>> {
    let mut entries = fs::read_dir(folder).context(folder.display())?.flatten();
    let found = entries.find(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    let path = found.ok_or_else(|| Error::new(format!("{} holds no {prefix}*", folder.display())))?.path();
    fs::read(&path).context(path.display())
}

/// `lib/modules/<version>`, which newer releases keep below `/usr`.
fn modules_folder(unpacked: &Path) -> Result<PathBuf> {
    for parent in ["usr/lib/modules", "lib/modules"] {
        if let Some(entry) = fs::read_dir(unpacked.join(parent)).ok().and_then(|mut entries| entries.next()) {
            return Ok(entry.context("reading the kernel package")?.path());
        }
    }
    Err(Error::new("the kernel package holds no modules"))
}
