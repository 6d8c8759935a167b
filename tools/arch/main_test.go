package main

import (
	"strings"
	"testing"
)

func TestTypesOfAnotherArchitecture(t *testing.T) {
	if n, err := vetArch("amd64", ".", "./testdata/narrow"); n != 1 || err != nil {
		t.Errorf("amd64: %d packages, %v", n, err)
	}
	if _, err := vetArch("arm64", ".", "./testdata/narrow"); err == nil || !strings.Contains(err.Error(), "narrow.go:7:") {
		t.Errorf("arm64: %v", err)
	}
	if _, err := vetArch("arm64", ".", "./testdata/nothing"); err == nil {
		t.Error("no package passes")
	}
}
