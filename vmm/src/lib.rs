//! The machine that devices are plugged into: configuration, lifecycle, KVM, ACPI.
