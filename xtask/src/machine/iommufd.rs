//! The kernel of machines whose VFIO has iommufd and device files. Debian's kernels are built without these, so iommufd
//! and all of VFIO are built here.

use std::fs;

use crate::error::{Context, Result};
use crate::lab::{ExtraModules, Lab};
use crate::machine::out_of_tree::Tree;

/// The kernel's folder in the lab.
pub(crate) const KERNEL: &str = "iommufd";
/// Files that are extracted from the kernel's source.
const SOURCES: [&str; 6] = [
    "drivers/iommu/iommufd/*",
    "drivers/iommu/iommu-priv.h",
    "drivers/vfio/*.[ch]",
    "drivers/vfio/Makefile",
    "drivers/vfio/pci/*",
    "lib/interval_tree.c",
];
/// The modules, in load order.
const MODULES: [&str; 5] = [
    "drivers/iommu/iommufd/iommufd.ko",
    "drivers/vfio/vfio.ko",
    "drivers/vfio/vfio_iommu_type1.ko",
    "drivers/vfio/pci/vfio-pci-core.ko",
    "drivers/vfio/pci/vfio-pci.ko",
];
/// Definitions that the kernel's configuration lacks, for the compiler.
const DEFINED: &str = "KCFLAGS=-DCONFIG_IOMMUFD_MODULE=1 -DCONFIG_IOMMUFD_DRIVER=1 -DCONFIG_VFIO_DEVICE_CDEV=1 \
    -DCONFIG_INTERVAL_TREE_SPAN_ITER=1";

/// Fetches the kernel and builds the modules, once.
pub(crate) fn prepare(lab: &Lab) -> Result<()> {
    if lab.kernel_path(KERNEL, "package").exists() {
        return Ok(());
    }
    let tree = Tree::fetch(lab, KERNEL)?;
    let folder = tree.extract(&SOURCES)?;
    let write = |path: &str, text: &str| fs::write(folder.join(path), text).context(path);
    write("Kbuild", "obj-m := drivers/iommu/iommufd/ drivers/vfio/\n")?;
    // The kernel has iova_bitmap and the second half of interval_tree for other users, but only if it has iommufd.
    let parts =
        "device.o fault.o hw_pagetable.o io_pagetable.o ioas.o main.o pages.o vfio_compat.o iova_bitmap.o spans.o";
    write("drivers/iommu/iommufd/Makefile", &format!("iommufd-y := {parts}\nobj-m := iommufd.o\n"))?;
    let intervals = fs::read_to_string(folder.join("lib/interval_tree.c")).context("lib/interval_tree.c")?;
    let spans = intervals.find("#ifdef CONFIG_INTERVAL_TREE_SPAN_ITER").and_then(|at| intervals.get(at..));
    let headers = "#include <linux/interval_tree.h>\n#include <linux/export.h>\n";
    write("drivers/iommu/iommufd/spans.c", &format!("{headers}{}", spans.unwrap_or_default()))?;
    let options = ["CONFIG_IOMMUFD=m", "CONFIG_VFIO_DEVICE_CDEV=y", "CONFIG_VFIO_MDEV=", DEFINED];
    tree.make("iommufd, and VFIO with it", &folder, &options)?;
    let built = MODULES.map(|module| folder.join(module));
    let extra = [
        ExtraModules { name: "vfio-pci", debian: &[], built: &built },
        // Among the built modules.
        ExtraModules { name: "vfio_iommu_type1", debian: &[], built: &[] },
        ExtraModules { name: "igb", debian: &["igb"], built: &[] },
    ];
    lab.unpack_kernel(KERNEL, tree.folder(), tree.names(), &[], &extra)
}
