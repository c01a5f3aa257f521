//! An error in a payload is one line, reported before anything is created.

#![expect(clippy::unwrap_used, reason = "what fails here is a failed test")]

mod common;

use common::{Code, Guest};

/// The error, which must be one line. No serial file may exist.
fn error(guest: &Guest) -> String {
    let error = guest.run().unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    assert!(!guest.path("serial").exists(), "{error}");
    error
}

#[test]
fn a_kernel_that_is_missing_or_unreadable_is_named() {
    let mut guest = Guest::new(&Code::default());
    guest.config.payload.kernel = Some(guest.path("no such kernel"));
    let message = error(&guest);
    assert!(message.starts_with("--kernel ") && message.contains("no such kernel: cannot be read"), "{message}");
    guest.config.payload.kernel = Some(guest.path("."));
    assert!(error(&guest).ends_with("not a regular file"), "{}", error(&guest));
}

#[test]
fn a_file_that_is_no_kernel_is_refused() {
    for bytes in [&b""[..], b"#!/bin/sh\n", &[0; 8192]] {
        let message = error(&Guest::with_kernel(bytes));
        assert!(message.contains("neither a bzImage nor an ELF file"), "{message}");
    }
    let mut elf = Code::default().elf();
    elf[64 + 2 * 56 + 8] = 17;
    let message = error(&Guest::with_kernel(&elf));
    assert!(message.contains("without a PVH entry"), "{message}");
}

#[test]
fn a_kernel_in_a_32_bit_file_runs() {
    let guest = Guest::with_kernel(&Code::default().out(0x3f8, b'3').power_off().elf_32());
    guest.run().unwrap();
    assert_eq!(std::fs::read(guest.path("serial")).unwrap(), b"3");
}

#[test]
fn a_compressed_kernel_is_refused_with_the_way_to_unpack_it() {
    for (magic, program) in [
        (&b"\x1f\x8b\x08"[..], "gzip"),
        (b"\xfd7zXZ\0", "xz"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"\x04\x22\x4d\x18", "lz4"),
        (b"BZh9", "bzip2"),
    ] {
        let message = error(&Guest::with_kernel(&[magic, &[0; 4096]].concat()));
        let expected =
            format!("/kernel: compressed by {program}; unpack it, by {program} -dc FILE > vmlinux, and give that");
        assert!(message.ends_with(&expected), "{message}");
        // A file that ends within the magic number.
        assert!(error(&Guest::with_kernel(&magic[..1])).contains("neither a bzImage"));
    }
}

#[test]
fn a_file_that_is_no_firmware_is_refused() {
    let mut guest = Guest::with_kernel(&[0; 8192]);
    guest.config.payload.firmware = guest.config.payload.kernel.take();
    let message = error(&guest);
    assert!(message.starts_with("--firmware ") && message.contains("kernel: not an ELF file"), "{message}");
    guest.config.payload.firmware = Some(guest.path("no such file"));
    assert!(error(&guest).contains("no such file: cannot be read"), "{}", error(&guest));
    guest.config.payload.kernel = Some(guest.path("kernel"));
    let message = error(&guest);
    assert!(message.starts_with("--firmware ") && message.ends_with("/kernel); leave one out"), "{message}");
}

#[test]
fn too_large_kernel_is_refused_with_the_memory_needed() {
    let mut guest = Guest::new(&Code::default().power_off());
    guest.config.memory.size = 1 << 20;
    let message = error(&guest);
    assert!(message.contains("3 MiB are needed"), "{message}");
}

#[test]
fn missing_or_too_large_initramfs_is_refused() {
    let mut guest = Guest::new(&Code::default().power_off());
    guest.config.payload.initramfs = Some(guest.path("no such file"));
    assert!(error(&guest).starts_with("--initramfs "));
    let path = guest.path("initramfs");
    let file = std::fs::File::create(&path).unwrap();
    guest.config.payload.initramfs = Some(path);
    for len in [15 << 20, 1 << 40, i64::MAX as u64] {
        if file.set_len(len).is_ok() {
            let message = error(&guest);
            assert!(message.starts_with("--initramfs ") && message.contains("MiB are needed"), "{message}");
        }
    }
    file.set_len(13 << 20).unwrap();
    guest.run().unwrap();
}

#[test]
fn a_command_line_that_is_too_long_is_refused() {
    let mut guest = Guest::new(&Code::default().power_off());
    guest.config.payload.cmdline = Some("x".repeat(0x1_0000));
    let message = error(&guest);
    assert!(message.starts_with("--cmdline: ") && message.contains("65535"), "{message}");
    guest.config.payload.cmdline = Some("x".repeat(0xffff));
    guest.run().unwrap();
}

#[test]
fn more_vcpus_than_can_be_are_refused() {
    for vcpus in [255, 256, 100_000] {
        let message = error(&Guest::new(&Code::default()).with_vcpus(vcpus));
        assert!(message.starts_with(&format!("--cpus boot={vcpus}")), "{message}");
    }
}

#[test]
fn more_memory_than_the_cpu_can_address_is_refused() {
    let mut guest = Guest::new(&Code::default().power_off());
    guest.config.memory.size = 1 << 62;
    assert!(error(&guest).starts_with("--memory size="));
}
