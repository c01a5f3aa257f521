//! `cargo xtask test`: its parts in their order, and the builds that run ahead of them.

use std::path::Path;
use std::time::Instant;

use crate::build;
use crate::checks::ahead::Ahead;
use crate::checks::suite::{Suite, Tally};
use crate::checks::{check, clients, contract, fuzz};
use crate::error::Result;
use crate::lab::{Lab, hypervisor_fw, uefi};
use crate::machine::lab_kind::LabKind;
use crate::progress::{note, seconds};
use crate::runs::cloud_image::{self, Firmware, Form};
use crate::stages::Stages;

/// Number of random requests that the contract tests send, beyond those that follow from the API's description.
const QUESTIONS: usize = 320;
/// The disks and firmware of the cloud images that `--all` boots.
const CLOUD_IMAGES: [(Form, Firmware); 3] =
    [(Form::Raw, Firmware::Edk2), (Form::Qcow2, Firmware::Edk2), (Form::Raw, Firmware::HypervisorFw)];

/// A part of the run.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    /// Format, lints, length of lines, and the rules for dependencies in deny.toml
    Lint,
    /// Unit and property tests
    Unit,
    /// Each fuzz target, for a few seconds
    Fuzz,
    /// The REST API against api/openapi.yaml
    Contract,
    /// Linux guests under the real binary
    Integration,
}

/// Options of the integration tests.
pub(crate) struct Options {
    /// Part of the names of the tests to run.
    pub filter: String,
    /// Machine on which guests run.
    pub lab: Option<LabKind>,
    /// True to run the longer tests as well.
    pub all: bool,
    /// True to rewrite the expectations from the guests' output.
    pub bless: bool,
    /// True to show all output of a test while it runs.
    pub verbose: bool,
}

/// Runs the requested part, or all of them. A part that fails does not keep the others from running. The last line of
/// the output counts all tests.
pub(crate) fn run(workspace: &Path, part: Option<Part>, options: &Options) -> Result<bool> {
    let started = Instant::now();
    let wanted = |this: Part| part.is_none_or(|only| only == this);
    let mut stages = Stages::default();
    let mut tally = Tally::default();
    let ahead = part.is_none().then(|| build_ahead(workspace));
    if wanted(Part::Lint) {
        tally += counted("lints", stages.measure("lint", || check::lints(workspace)));
    }
    if wanted(Part::Unit) {
        tally += counted("unit tests", check::unit_tests(workspace, &mut stages));
    }
    if wanted(Part::Contract) {
        tally += counted("contract tests", contract_tests(workspace, wanted(Part::Unit), &mut stages));
    }
    if wanted(Part::Integration) {
        tally += counted("integration tests", integration(workspace, options, &mut stages));
    }
    // They come last because guests of the lab leave time for their build.
    if wanted(Part::Fuzz) {
        tally += counted("fuzz targets", fuzz::smoke(workspace, &mut stages));
    }
    drop(ahead);
    if options.all && wanted(Part::Integration) && options.filter.is_empty() {
        tally += stages.measure("cloud images", || cloud_images(workspace));
    }
    stages.print();
    note("done", seconds(started.elapsed()));
    println!("{} passed, {} failed", tally.passed, tally.failed);
    Ok(tally.failed == 0)
}

/// A part that could not run counts as a failed test. The others still run.
fn counted(part: &str, outcome: Result<Tally>) -> Tally {
    outcome.unwrap_or_else(|error| {
        note("FAILED", format!("{part}: {error}"));
        Tally { passed: 0, failed: 1 }
    })
}

/// Starts the builds of later parts that share no target folder with those of earlier ones: the optimised programs,
/// most of whose time is one thread, and then the fuzz targets.
fn build_ahead(workspace: &Path) -> Ahead {
    let mut builds = vec![build::command_for_vmm_and_fixtures(workspace)];
    // The part that runs fuzz targets prints what it cannot install.
    builds.extend(fuzz::command_for_targets(workspace).ok());
    Ahead::start(builds)
}

fn contract_tests(workspace: &Path, tests_are_built: bool, stages: &mut Stages) -> Result<Tally> {
    let program = stages.measure("build for contract tests", || build::checked_vmm(workspace, tests_are_built))?;
    let contract = stages.measure("contract tests", || contract::run(workspace, &program, QUESTIONS));
    let clients = stages.measure("generated clients", || clients::run(workspace, &program));
    let mut tally = counted("contract tests", contract);
    tally += counted("generated clients", clients);
    Ok(tally)
}

fn integration(workspace: &Path, options: &Options, stages: &mut Stages) -> Result<Tally> {
    let lab = Lab::open(workspace)?;
    stages.measure("packages and images of lab", || {
        lab.prepare_everything()?;
        uefi::firmware(&lab)?;
        uefi::guest_disk(&lab)?;
        hypervisor_fw::copy(&lab, workspace, "tests of hypervisor-fw")
    })?;
    let (vmm, fixtures) = stages.measure("optimised build for lab", || build::vmm_and_fixtures(workspace))?;
    let tests = stages.measure("build of lab tests", || build::tests(workspace))?;
    let place = LabKind::decide(options.lab, &lab, &vmm)?;
    let suite = Suite {
        lab: &lab,
        workspace,
        vmm: &vmm,
        fixtures: &fixtures,
        tests: &tests,
        place,
        filter: &options.filter,
        all: options.all,
        bless: options.bless,
        verbose: options.verbose,
    };
    stages.measure("lab tests", || suite.run())
}

fn cloud_images(workspace: &Path) -> Tally {
    let mut tally = Tally::default();
    for (form, firmware) in CLOUD_IMAGES {
        let ran = Lab::open(workspace).and_then(|lab| cloud_image::run(&lab, workspace, form, firmware));
        tally += counted("the cloud image", ran.map(|ran| Tally { passed: usize::from(ran), failed: 0 }));
    }
    tally
}
