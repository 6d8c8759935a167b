package spell

import (
	"strings"
	"testing"
)

func TestDistanceCountsChanges(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"a", "", 1}, {"", "ab", 2}, {"map", "map", 0}, {"mapp", "map", 1}, {"amp", "map", 1}, {"list", "lost", 1}, {"kitten", "sitting", 3}, {"ä", "a", 1}} {
		if got := Distance(c.a, c.b); got != c.want {
			t.Errorf("%q to %q is %d, want %d", c.a, c.b, got, c.want)
		}
	}
}

func TestNearestWordIsSuggested(t *testing.T) {
	known := []string{"list", "show", "map", "unmap", "device"}
	for word, want := range map[string]string{
		"lsit": "list", "mapp": "map", "umap": "map", "devcie": "device", "xyz": "", "": "", "q": "", strings.Repeat("list", 1<<16): "",
	} {
		if got := Nearest(word, known); got != want {
			t.Errorf("%q is taken for %q, want %q", word, got, want)
		}
	}
	if got := Suggest("lsit", known); got != `; did you mean "list"?` {
		t.Errorf("it says %q", got)
	}
	if got := Suggest("xyz", known); got != "" {
		t.Errorf("it says %q", got)
	}
}
