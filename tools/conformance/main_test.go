package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestIdsIn(t *testing.T) {
	for _, tc := range []struct {
		name string
		want []string
	}{
		{"TestR050_ImmLayout", []string{"R-050"}},
		{"TestSession/R-050_shift_by_depth", []string{"R-050"}},
		{"TestIP14_MTUClasses", []string{"IP-14"}},
		{"TestIP05IP06_Children", []string{"IP-05"}},
		{"TestIP05_IP06_Children", []string{"IP-05", "IP-06"}},
		{"TestWire/W-05_IPv4_groups", []string{"W-05"}},
		{"TestBO12_Announce", []string{"BO-12"}},
		{"TestBond/BO-12", []string{"BO-12"}},
		{"TestIP140_NotANumber", nil},
		{"TestIPv4", nil},
		{"TestIP05/nothing_of_its_own", nil},
	} {
		if got := idsIn(tc.name); !slices.Equal(got, tc.want) {
			t.Errorf("idsIn(%q) = %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestReadDoc(t *testing.T) {
	page := filepath.Join(t.TempDir(), "page.md")
	text := "| R-050 | layout | x_test.go |\n| IP-03 | 20 octets | wire_test.go |\n- W-05 groups\n| **BO-12** | announce |\nIP-99 in prose\n| IP-100 | no |\n"
	if err := os.WriteFile(page, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	reqs := map[string]*requirement{}
	if err := readDoc(page, reqs); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"R-050", "IP-03", "W-05", "BO-12"} {
		if reqs[id] == nil {
			t.Errorf("%s was not found", id)
		}
	}
	if len(reqs) != 4 {
		t.Errorf("%d requirements, want 4", len(reqs))
	}
}
