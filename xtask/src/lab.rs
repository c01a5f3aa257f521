//! The lab: kernels, their modules and a small userland, kept under `target/lab`.
//!
//! Each part is fetched or built when its path is first requested, so a command only prepares what it uses.

pub(crate) mod cni;
pub(crate) mod cpio;
pub(crate) mod gpt;
pub(crate) mod hypervisor_fw;
pub(crate) mod images;
pub(crate) mod kernel;
pub(crate) mod programs;
pub(crate) mod uefi;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use crate::error::{Context, Error, Result};
use crate::fetch::apt::{self, Apt, KERNEL};
use crate::lab::kernel::{Module, ModuleTree, vmlinux_of};
use crate::progress::Step;

/// A kernel of the lab, from a package.
struct Kernel {
    /// Folder below `target/lab/kernels`.
    name: &'static str,
    /// The package that depends on the newest build of it.
    meta: &'static str,
    /// Versions of it that are accepted: see [`Apt::resolve`].
    series: &'static str,
    /// Prefixes of the names of its packages, before the version.
    packages: &'static [&'static str],
    /// The modules that the lab loads, without their dependencies.
    modules: &'static [&'static str],
    /// The modules that tests may load, without their dependencies.
    extra: &'static [&'static str],
    /// The modules of container networks that `cargo xtask bench` measures, without their dependencies.
    containers: &'static [&'static str],
}

/// Modules that guests load only for a test that needs them: loading them always would slow every boot.
macro_rules! guest_extra {
    ($($more:literal),*) => {
        &[
            "virtio_blk",
            "virtio_console",
            "virtio_rng",
            "virtio_balloon",
            "virtio_mem",
            "vmw_vsock_virtio_transport",
            "button",
            "evdev",
            "pvpanic-pci",
            "virtio_pmem",
            "nd_pmem",
            "virtiofs",
            "isofs",
            "bonding",
            "macvlan",
            "8021q",
            $($more),*
        ]
    };
}

/// Modules that every guest's kernel has.
const GUEST_EXTRA: &[&str] = guest_extra![];
/// As [`GUEST_EXTRA`], with the driver of the virtual IOMMU, and those that pass functions behind it to programs and to
/// nested VMs.
const GUEST_EXTRA_IOMMU: &[&str] = guest_extra!["virtio_iommu", "vfio-pci", "vfio_iommu_type1", "kvm-amd"];

/// The modules that a first-level machine loads.
const FIRST_LEVEL: &[&str] = &["kvm-amd", "tun", "9pnet_virtio", "9p", "vhost_net", "vhost_vdpa", "vduse", "8021q"];

/// The modules of guests with an igb or a VF of one, in addition to virtio NICs.
const IGB: &[&str] = &["igb", "igbvf", "virtio_pci", "virtio_net"];

/// Modules that guests with a generic kernel load only for a test that needs them: those of an X550 and its VFs, of
/// rules for frames that it may carry out, of functions that programs drive, and of the channel by which a guest
/// governs its VFs.
macro_rules! generic_extra {
    ($($more:expr),*) => {
        &[
            "ixgbe",
            "ixgbevf",
            "8021q",
            "macvlan",
            "cls_u32",
            "sch_ingress",
            "act_mirred",
            "act_gact",
            "virtio_blk",
            "virtio_console",
            "vfio-pci",
            "vfio_iommu_type1",
            "8139cp",
            $($more),*
        ]
    };
}

const GENERIC_EXTRA_6_1: &[&str] = generic_extra![];
/// As [`GENERIC_EXTRA_6_1`], with the driver of the virtual IOMMU.
const GENERIC_EXTRA: &[&str] = generic_extra![IOMMU_DRIVER];
/// The driver of the virtual IOMMU.
const IOMMU_DRIVER: &str = "virtio_iommu";

/// The modules of container networks without VFs.
const CONTAINERS: &[&str] = &["veth", "bridge", "vxlan", "nft_chain_nat", "nft_masq"];

/// The kernels of guests, and that of the first-level machine. The latter is Debian's generic kernel, because only that
/// has 9p, through which the machine mounts the checkout.
const KERNELS: [Kernel; 7] = [
    Kernel {
        name: "6.1",
        meta: "linux-image-cloud-amd64",
        series: "6.1.",
        packages: &[KERNEL],
        modules: &["virtio_pci", "virtio_net"],
        extra: GUEST_EXTRA,
        containers: &[],
    },
    Kernel {
        name: "6.12",
        meta: "linux-image-cloud-amd64",
        series: "6.12.",
        packages: &[KERNEL],
        modules: &["virtio_pci", "virtio_net"],
        extra: GUEST_EXTRA_IOMMU,
        containers: CONTAINERS,
    },
    Kernel {
        name: BACKPORTS,
        meta: "linux-image-cloud-amd64",
        series: BACKPORTS_SERIES,
        packages: &["linux-base-", "linux-binary-", "linux-modules-"],
        modules: &["virtio_pci", "virtio_net"],
        extra: GUEST_EXTRA_IOMMU,
        containers: &[],
    },
    Kernel {
        name: FIRST_LEVEL_KERNEL,
        meta: "linux-image-amd64",
        series: "6.12.",
        packages: &[KERNEL],
        modules: FIRST_LEVEL,
        // For `cargo xtask bench vsock --qemu`, and for tests of VFIO and of disks with large blocks.
        extra: &["vhost_vsock", "vfio-pci", "vfio_iommu_type1", "virtio_net", "igb", "loop"],
        containers: &["vxlan", "bridge", "veth"],
    },
    // For `cargo xtask bench switch --qemu`, and for tests of VFIO and of the X550: Debian's cloud kernel has no
    // drivers for such NICs.
    Kernel {
        name: GENERIC_KERNEL,
        meta: "linux-image-amd64",
        series: "6.12.",
        packages: &[KERNEL],
        modules: IGB,
        extra: GENERIC_EXTRA,
        containers: &[],
    },
    Kernel {
        name: GENERIC_KERNEL_6_1,
        meta: "linux-image-amd64",
        series: "6.1.",
        packages: &[KERNEL],
        modules: IGB,
        extra: GENERIC_EXTRA_6_1,
        containers: &[],
    },
    Kernel {
        name: GENERIC_BACKPORTS,
        meta: "linux-image-amd64",
        series: BACKPORTS_SERIES,
        packages: &["linux-base-", "linux-binary-", "linux-modules-"],
        modules: IGB,
        extra: GENERIC_EXTRA,
        containers: &[],
    },
];

/// The packages of a guest's userland: busybox, and the real `lspci` with its libraries.
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

/// Packages of other projects' programs that are backends of guests' devices, configure them, or create disk images.
/// They are in the first-level machine, most of them in `PATH`.
const PEERS: [&str; 9] =
    ["passt", "dpdk-dev", "ibverbs-providers", "iproute2", "zlib1g", "qemu-utils", "virtiofsd", "swtpm", "swtpm-libs"];

/// The kernel of the first-level machine.
pub(crate) const FIRST_LEVEL_KERNEL: &str = "first-level";
/// Debian's generic kernel, for guests with an Intel NIC.
pub(crate) const GENERIC_KERNEL: &str = "generic";
/// The generic kernel of the older release.
pub(crate) const GENERIC_KERNEL_6_1: &str = "generic-6.1";
/// The generic kernel of Debian's backports, for tests of such guests with [`BACKPORTS`] in their names.
pub(crate) const GENERIC_BACKPORTS: &str = "generic-backports";
/// The kernels of guests, by the version in their names.
pub(crate) const GUEST_KERNELS: [&str; 2] = ["6.1", "6.12"];

/// The newest kernel of Debian's backports, which is fetched for tests with this in their names.
pub(crate) const BACKPORTS: &str = "backports";
/// A part of the versions of packages from backports.
const BACKPORTS_SERIES: &str = "~bpo";

/// The folder `target/lab`.
pub(crate) struct Lab {
    folder: PathBuf,
    /// Opened when the first package is fetched. The lock is held while one is fetched.
    apt: Mutex<Option<Apt>>,
    /// The images that this process has found or brought up to date.
    pub images: Mutex<BTreeSet<String>>,
}

/// Modules that tests may load under one name.
pub(crate) struct ExtraModules<'a> {
    /// The name.
    pub name: &'a str,
    /// Debian's modules, without their dependencies.
    pub debian: &'a [&'a str],
    /// Modules that are built here, in load order, after Debian's.
    pub built: &'a [PathBuf],
}

/// Modules in load order: file names and ELF images.
pub(crate) type Modules = BTreeMap<String, Vec<u8>>;

impl Lab {
    /// Creates the folder. Nothing is fetched yet.
    pub(crate) fn open(workspace: &Path) -> Result<Lab> {
        let folder = workspace.join("target/lab");
        fs::create_dir_all(folder.join("images")).context(format!("making {}", folder.display()))?;
        Ok(Lab { folder, apt: Mutex::default(), images: Mutex::default() })
    }

    /// `target/lab` itself.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// A file of a kernel: `kernel("6.1", "vmlinux")`. Fetches the kernel if it is missing.
    pub(crate) fn kernel(&self, name: &str, file: &str) -> Result<PathBuf> {
        if let Some(kernel) = KERNELS.iter().find(|kernel| kernel.name == name) {
            self.fetch_kernel(kernel)?;
        }
        Ok(self.kernel_path(name, file))
    }

    /// Path at which [`Lab::kernel`] keeps a file, which may be missing.
    pub(crate) fn kernel_path(&self, name: &str, file: &str) -> PathBuf {
        self.folder.join("kernels").join(name).join(file)
    }

    /// A file of the guest tools. Fetches them if they are missing.
    pub(crate) fn tool(&self, path: &str) -> Result<PathBuf> {
        self.fetch_tools()?;
        Ok(self.tool_path(path))
    }

    /// Path at which [`Lab::tool`] keeps a file, which may be missing.
    pub(crate) fn tool_path(&self, path: &str) -> PathBuf {
        self.folder.join("tools").join(path)
    }

    /// The root of the programs of other projects. Fetches them if they are missing.
    pub(crate) fn peers(&self) -> Result<PathBuf> {
        self.fetch_peers()?;
        Ok(self.peers_path())
    }

    fn peers_path(&self) -> PathBuf {
        self.folder.join("peers")
    }

    /// The modules that machines with this kernel load at boot.
    pub(crate) fn modules(&self, kernel: &str) -> Result<Modules> {
        self.modules_in(kernel, "modules")
    }

    /// The modules that tests may load, each with its dependencies that are not loaded at boot.
    pub(crate) fn extra_modules(&self, kernel: &str) -> Result<Vec<(&'static str, Modules)>> {
        let wanted = KERNELS.iter().filter(|known| known.name == kernel).flat_map(|known| known.extra);
        wanted.map(|&module| Ok((module, self.modules_in(kernel, &format!("extra/{module}"))?))).collect()
    }

    /// The modules of container networks, with their dependencies that are not loaded at boot.
    pub(crate) fn container_modules(&self, kernel: &str) -> Result<Modules> {
        self.modules_in(kernel, "containers")
    }

    fn modules_in(&self, kernel: &str, folder: &str) -> Result<Modules> {
        let folder = self.kernel(kernel, folder)?;
        let mut modules = BTreeMap::new();
        for entry in fs::read_dir(&folder).context(folder.display())?.flatten() {
            let image = fs::read(entry.path()).context(entry.path().display())?;
            modules.insert(entry.file_name().to_string_lossy().into_owned(), image);
        }
        Ok(modules)
    }

    /// The packages of the lab, one per line.
    pub(crate) fn versions(&self) -> String {
        let records = KERNELS
            .iter()
            .map(|kernel| self.kernel_path(kernel.name, "package"))
            .chain([self.tool_path("package"), self.peers_path().join("package")]);
        records.filter_map(|path| fs::read_to_string(path).ok()).collect()
    }

    fn fetch_kernel(&self, kernel: &Kernel) -> Result<()> {
        let mut apt = self.apt.lock();
        let wanted = [kernel.modules, kernel.extra, kernel.containers].concat().join(" ");
        let record = self.kernel_path(kernel.name, "package");
        let modules_record = self.kernel_path(kernel.name, "wanted-modules");
        if record.exists() && fs::read_to_string(&modules_record).is_ok_and(|have| have == wanted) {
            return Ok(());
        }
        let mut backports = None;
        let apt = match kernel.series {
            BACKPORTS_SERIES => backports.insert(Apt::with_backports(&self.folder.join("apt-backports"))?),
            _ => self.apt(&mut apt)?,
        };
        let (package, version) = apt.resolve(kernel.meta, kernel.series)?;
        let release = package.strip_prefix(KERNEL).unwrap_or(&package);
        let packages: Vec<_> = kernel.packages.iter().map(|part| format!("{part}{release}={version}")).collect();
        let unpacked = self.folder.join("unpacked");
        let _ = fs::remove_dir_all(&unpacked);
        let names = apt.unpack(&package, &packages.iter().map(String::as_str).collect::<Vec<_>>(), &unpacked)?;

        let step = Step::begin("unpack", format!("the kernel {} and its modules", kernel.name));
        // The old folder may be in use until the new one is complete.
        let folder = self.kernel_path(&format!("{}.new", kernel.name), "");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).context(format!("making {}", folder.display()))?;
        let modules = modules_folder(&unpacked)?;
        // Newer packages keep the kernel next to its modules.
        let bzimage = match unpacked.join("boot") {
            boot if boot.exists() => read_one(&boot, "vmlinuz-")?,
            _ => read_one(&modules, "vmlinuz")?,
        };
        fs::write(folder.join("vmlinux"), vmlinux_of(&bzimage)?).context("writing vmlinux")?;
        fs::write(folder.join("bzImage"), bzimage).context("writing bzImage")?;
        let tree = ModuleTree::open(&modules)?;
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
        let place = self.kernel_path(kernel.name, "");
        let _ = fs::remove_dir_all(&place);
        fs::rename(&folder, &place).context(format!("making {}", place.display()))?;
        let _ = fs::remove_dir_all(&unpacked);
        step.done();
        Ok(())
    }

    /// Turns an unpacked package into a kernel of first-level machines. The module files `drivers` are loaded as well;
    /// `extra` are for tests.
    pub(crate) fn unpack_kernel(
        &self,
        name: &str,
        unpacked: &Path,
        package: &str,
        drivers: &[PathBuf],
        extra: &[ExtraModules<'_>],
    ) -> Result<()> {
        let _ = fs::remove_dir_all(self.kernel_path(name, ""));
        let modules = self.kernel_path(name, "modules");
        let tree = ModuleTree::open(&modules_folder(unpacked)?)?;
        let loaded = tree.load_order(FIRST_LEVEL)?;
        write_modules(&modules, loaded.iter())?;
        // After all others in load order.
        copy_modules(&modules, 90, drivers)?;
        for ExtraModules { name: module, debian, built } in extra {
            let folder = self.kernel_path(name, "extra").join(module);
            let needed = tree.load_order(debian)?;
            let missing = needed.iter().filter(|module| loaded.iter().all(|loaded| loaded.name != module.name));
            write_modules(&folder, missing)?;
            copy_modules(&folder, 90, built)?;
        }
        let bzimage = read_one(&unpacked.join("boot"), "vmlinuz-")?;
        fs::write(self.kernel_path(name, "bzImage"), bzimage).context("writing bzImage")?;
        fs::write(self.kernel_path(name, "package"), package).context("recording the kernel's version")
    }

    fn fetch_tools(&self) -> Result<()> {
        let mut apt = self.apt.lock();
        let record = self.tool_path("package");
        if record.exists() {
            return Ok(());
        }
        let _ = fs::remove_dir_all(self.tool_path(""));
        let packages = TOOLS.map(|name| format!("{name}/{}", apt::RELEASE_6_1));
        let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
        let names =
            self.apt(&mut apt)?.unpack("busybox, and lspci with its libraries", &packages, &self.tool_path(""))?;
        fs::write(record, names).context("recording the versions of the tools")
    }

    fn fetch_peers(&self) -> Result<()> {
        let mut apt = self.apt.lock();
        let (record, wanted) = (self.peers_path().join("wanted"), PEERS.join(" "));
        if fs::read_to_string(&record).is_ok_and(|have| have == wanted) {
            return Ok(());
        }
        let _ = fs::remove_dir_all(self.peers_path());
        let apt = self.apt(&mut apt)?;
        let packages = apt.with_libraries(&PEERS, apt::RELEASE_6_12)?;
        let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
        apt.unpack(&format!("{} and their libraries", PEERS.join(", ")), &packages, &self.peers_path())?;
        let versions =
            packages.iter().filter(|package| PEERS.iter().any(|peer| package.starts_with(&format!("{peer}="))));
        let versions: String = versions.map(|package| format!("{package}\n")).collect();
        fs::write(self.peers_path().join("package"), versions).context("recording the versions of the peers")?;
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

/// True if the lab has the driver of the virtual IOMMU for this kernel.
pub(crate) fn has_iommu_driver(kernel: &str) -> bool {
    KERNELS.iter().any(|known| known.name == kernel && known.extra.contains(&IOMMU_DRIVER))
}

/// True if this is Debian's generic kernel, for guests.
pub(crate) fn is_generic(kernel: &str) -> bool {
    [GENERIC_KERNEL, GENERIC_KERNEL_6_1, GENERIC_BACKPORTS].contains(&kernel)
}

/// Writes modules into a new folder, under names that sort in load order.
fn write_modules<'a>(folder: &Path, modules: impl Iterator<Item = &'a Module>) -> Result<()> {
    fs::create_dir_all(folder).context(format!("making {}", folder.display()))?;
    for (number, module) in modules.enumerate() {
        let path = folder.join(format!("{number:02}-{}.ko", module.name));
        fs::write(&path, &module.image).context(path.display())?;
    }
    Ok(())
}

/// Copies modules that were built here into a folder, with numbers from `first` on in their names.
fn copy_modules(folder: &Path, first: usize, modules: &[PathBuf]) -> Result<()> {
    for (number, module) in (first..).zip(modules) {
        let file = module.file_name().unwrap_or_default().to_string_lossy();
        fs::copy(module, folder.join(format!("{number}-{file}"))).context(module.display())?;
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
