//! Drivers that Debian's kernels lack, built here from Debian's own source for a kernel of first-level machines.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Context, Result};
use crate::fetch::apt::{self, Apt, output};
use crate::lab::Lab;
use crate::progress::Step;

/// The package with the kernel's source.
const SOURCE: &str = "linux-source-6.12";
/// Suffix of that package's versions that are built for the Debian release whose compilers this machine has.
const BUILT_FOR: &str = "~deb12";

/// A kernel with its headers and its source, unpacked in a folder that is removed when this is dropped.
pub(crate) struct Tree {
    folder: PathBuf,
    headers: PathBuf,
    names: String,
}

impl Tree {
    /// Fetches a kernel, its headers and its source, to build the kernel `name` of the lab.
    pub(crate) fn fetch(lab: &Lab, name: &str) -> Result<Tree> {
        apt::install_missing(&[("gcc", "gcc"), ("make", "make"), ("xz", "xz-utils")])?;
        let mut apt = Apt::new(&lab.folder().join("apt"))?;
        let version = apt.version(SOURCE, BUILT_FOR)?;
        let upstream = version.split('-').next().unwrap_or_default();
        let release = format!("{upstream}+deb12");
        let folder = lab.folder().join(format!("unpacked-{name}"));
        let _ = fs::remove_dir_all(&folder);
        let packages = [
            format!("linux-image-{release}-amd64"),
            format!("linux-headers-{release}-amd64"),
            format!("linux-headers-{release}-common"),
            format!("linux-kbuild-{release}"),
            format!("{SOURCE}={version}"),
        ];
        let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
        let names = apt.unpack(&format!("Linux {release}, its headers and its source"), &packages, &folder)?;
        let headers = folder.join(format!("usr/src/linux-headers-{release}-amd64"));
        let makefile = headers.join("Makefile");
        let text = fs::read_to_string(&makefile).context(makefile.display())?;
        // The packages expect to be installed.
        let text = text.replace("/usr/src/", &format!("{}/", folder.join("usr/src").display()));
        fs::write(&makefile, text).context(makefile.display())?;
        Ok(Tree { folder, headers, names })
    }

    /// The root of the unpacked packages.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The names of the packages, one per line.
    pub(crate) fn names(&self) -> &str {
        &self.names
    }

    /// Unpacks the parts of the source that match `patterns` (`drivers/vdpa/*`). Returns the folder that corresponds to
    /// the source's root.
    pub(crate) fn extract(&self, patterns: &[&str]) -> Result<PathBuf> {
        let source = self.folder.join("usr/src").join(format!("{SOURCE}.tar.xz"));
        let folder = self.folder.join("modules");
        fs::create_dir_all(&folder).context(folder.display())?;
        let mut extract = Command::new("tar");
        // The archive has one folder.
        extract.arg("-xJf").arg(source).arg("-C").arg(&folder).args(["--strip-components=1", "--wildcards"]);
        output(extract.args(patterns.iter().map(|pattern| format!("*/{pattern}"))))?;
        Ok(folder)
    }

    /// Builds the modules of the makefile in `folder`. `what` is the step's name in the output, `options` are make's.
    pub(crate) fn make(&self, what: &str, folder: &Path, options: &[&str]) -> Result<()> {
        let step = Step::begin("build", what);
        let mut make = Command::new("make");
        make.arg("-C").arg(&self.headers).arg(format!("M={}", folder.display()));
        // Type information is not needed, and requires another tool.
        output(make.arg("CONFIG_DEBUG_INFO_BTF_MODULES=").args(options).arg("modules"))?;
        step.done();
        Ok(())
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
